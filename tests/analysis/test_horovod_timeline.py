"""Horovod's timeline, built as documented: stragglers, ranks that do not come, cut files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from rankscope_server.findings.finding import Finding
from rankscope_server.importers.horovod_timeline import read_timeline
from rankscope_server.importers.json_events import TraceError
from rankscope_server.importers.recordings import format_of, look_at, read_recordings
from tests.analysis.horovod_files import EPOCH_US, TimelineFile

RANKS, STEPS = 4, 120
LAYERS = ("DistributedOptimizer.head", "DistributedOptimizer.body")


def job(slow: int | None = None, *, steps: int = STEPS, epoch_us: int | None = EPOCH_US):
    """Return the timeline of a job of which one rank may work longer, and when it ended."""
    chance = np.random.default_rng(7)
    file = TimelineFile(epoch_us)
    began = file.reduce("broadcast.weights", dict.fromkeys(range(RANKS), 1000), 800,
                        kind="BROADCAST")  # fmt: skip
    for step in range(1, steps + 1):
        file.cycle(began)
        work = 40_000 + 400 * np.abs(chance.normal(size=RANKS))
        if slow is not None and step > 40:
            work[slow] += 20_000
        for place, layer in enumerate(LAYERS, 1):
            ready = {rank: began + int(work[rank] * place / len(LAYERS)) for rank in range(RANKS)}
            ended = file.reduce(layer, ready, 2_000, (64, 4))
        began = ended
    return file, began


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    return path


def findings_of(path: Path) -> list[Finding]:
    return list(look_at(read_recordings([path])).findings)


def test_a_rank_that_is_ready_late_is_the_straggler(tmp_path: Path) -> None:
    file, _ = job(slow=2)
    path = write(tmp_path, file.text())
    assert format_of(path) == "horovod"
    (finding,) = (one for one in findings_of(path) if one.kind == "slow_compute")
    assert finding.ranks == (2,)
    assert finding.onset_step is not None
    assert abs(finding.onset_step - 41) <= 2
    assert finding.cost_throughput_ratio == pytest.approx(20 / 62, abs=0.03)


def test_ranks_alike_are_not_accused(tmp_path: Path) -> None:
    file, _ = job()
    assert [one for one in findings_of(write(tmp_path, file.text())) if one.ranks] == []


def test_collectives_have_sizes_and_times_of_each_rank(tmp_path: Path) -> None:
    file, ended = job(steps=3)
    recording = read_recordings([write(tmp_path, file.text())])
    assert (recording.num_ranks, recording.found.world_size, recording.left_out) == (4, 4, [])
    (chunk,) = (
        one for one in recording.found.chunks if one.kind == "collectives" and one.rank == 3
    )
    columns = decode_chunk(chunk.data)
    assert list(columns["operation"]) == ["broadcast"] + ["all_reduce"] * 6
    assert list(columns["step"]) == [0, 1, 1, 2, 2, 3, 3]
    assert list(columns["size_bytes"]) == [1024] * 7
    assert set(columns["call_site"]) == {"broadcast.weights", *LAYERS}
    last = int(columns["arrived_ns"][-1] + columns["duration_ns"][-1])
    assert last == (EPOCH_US + ended) * 1000
    assert all(state == schema.ENDED for state in columns["state"])


def test_a_rank_that_is_never_ready_is_what_the_others_wait_for(tmp_path: Path) -> None:
    file, ended = job(steps=60)
    ready = {rank: ended + 40_000 for rank in range(RANKS) if rank != 1}
    file.negotiate(LAYERS[0], ready)
    path = write(tmp_path, file.text())
    assert not [one for one in findings_of(path) if one.kind == "hang"], "since when is not known"
    for seconds in range(120):
        file.cycle(ended + seconds * 1_000_000)
    (finding,) = (one for one in findings_of(write(tmp_path, file.text())) if one.kind == "hang")
    assert finding.ranks == (1,)
    assert set(finding.victims) == {0, 2, 3}


def test_a_job_that_was_killed_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    file, _ = job(slow=2)
    text = file.text()
    whole = read_timeline(write(tmp_path, text))
    cut = read_timeline(write(tmp_path, text[: len(text) * 3 // 4]))
    assert cut.num_ranks == whole.num_ranks
    count = len(cut.operations)
    assert 0.7 < count / len(whole.operations) < 0.8
    assert [one.ended_us for one in cut.operations[: count - 2]] == [
        one.ended_us for one in whole.operations[: count - 2]
    ]
    older = read_timeline(write(tmp_path, text.removesuffix("]") + ",\n"))
    assert len(older.operations) == len(whole.operations)


def test_what_the_cache_hides_is_said(tmp_path: Path) -> None:
    file, ended = job(steps=2)
    for _ in range(10):
        for layer in LAYERS:
            ended = file.process(layer, ended + 20_000, 2_000)
    recording = read_recordings([write(tmp_path, file.text())])
    (line,) = recording.left_out
    assert "20 of 25 collectives" in line
    assert "HOROVOD_CACHE_CAPACITY=0" in line
    steps = [decode_chunk(one.data) for one in recording.found.chunks if one.kind == "steps"]
    assert [list(columns["step"]) for columns in steps] == [[2]] * RANKS


def test_without_a_start_in_wall_clock_the_file_ends_when_it_was_written(tmp_path: Path) -> None:
    file, ended = job(steps=3, epoch_us=None)
    path = write(tmp_path, file.text())
    timeline = read_timeline(path)
    assert timeline.base_ns + ended * 1000 == pytest.approx(path.stat().st_mtime_ns, abs=1e6)


@pytest.mark.parametrize("text", ["[", '[{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1}]'])
def test_a_file_without_ranks_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=r"timeline\.json: no rank is seen to become ready"):
        read_timeline(path)


@pytest.mark.parametrize(
    "event",
    ['{"ph": "X", "pid": "a", "ts": 1}', '{"ph": "E", "pid": 1, "ts": "x"}', "7", "null",
     '{"ph": "B", "pid": 1, "name": 5, "ts": -1}', '{"ph": "E", "pid": 9, "ts": 5, "args": []}',
     '{"ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": "no"}}'],
)  # fmt: skip
def test_an_event_of_another_shape_changes_nothing(tmp_path: Path, event: str) -> None:
    file, _ = job(steps=3)
    text = file.text()
    whole = read_timeline(write(tmp_path, text))
    odd = read_timeline(write(tmp_path, text.replace("[\n", f"[\n{event},\n", 1)))
    assert odd.operations == whole.operations
