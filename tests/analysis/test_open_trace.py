"""The open trace AR of ByteDance's StragglerAnalysis against the figures that came with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope_server.importers.open_trace import NotATrace, Reading, read_open_trace, replay_of
from rankscope_server.importers.recordings import look_at, read_recordings
from rankscope_server.verdict.answers import Look
from tests.analysis.open_trace_truth import Truth
from tests.analysis.replay_measures import of_kind, of_last_stage, share_of, slowdown_of
from tests.shared_data import SHARED_DATA, named

TRACE = SHARED_DATA / "traces" / "trace-AR.parquet"
pytest.importorskip("pyarrow", reason="reading Parquet needs the extra `traces`")


@pytest.fixture(scope="module")
def trace() -> Any:
    if not TRACE.exists():
        pytest.skip(f"the open trace is not there: {named(TRACE)}")
    return read_open_trace(TRACE)


@pytest.fixture(scope="module")
def reading(trace: Any) -> Reading:
    return replay_of(trace)


@pytest.fixture(scope="module")
def published(trace: Any) -> dict[str, Any]:
    names = ("result", "mw", "ms")
    return {name: json.loads((TRACE.parent / f"{name}-AR.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def look(trace: Any) -> Look:
    return look_at(read_recordings([TRACE]))


def test_the_trace_is_read_whole(trace: Any, reading: Reading) -> None:
    assert len(trace.columns["step"]) == 117_216
    assert (len(trace.ranks), len(trace.steps)) == (16, 44)
    assert abs(reading.replay.error_ratio()) < 0.02


def test_slowdown_is_the_published_one(reading: Reading, published: dict[str, Any]) -> None:
    replay, result = reading.replay, published["result"]
    assert result["blocking_slowdown"] == pytest.approx(1.973, abs=0.001)
    assert replay.slowdown() == pytest.approx(result["blocking_slowdown"], rel=0.01)
    for kind in ("backward-compute", "forward-compute", "grads-reduce-scatter", "optimizer"):
        truth = result["blocking_decompose_by_optype"][kind]
        assert slowdown_of(replay, of_kind(replay, kind)) == pytest.approx(truth, rel=0.02), kind


def test_the_sentences_hold_against_a_computation_of_their_own(look: Look) -> None:
    """S and what-if as they are shown, against the parquet alone and against what was published."""
    truth = Truth(TRACE)
    mean, ideal = truth.mean_step_seconds(), truth.ideal_step_seconds()
    verdict = look.verdict
    assert verdict is not None
    shown = re.search(r"S = ([\d.]+): ([\d.]+) s a step, against ([\d.]+) s", verdict.why)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(mean / ideal, rel=0.001)
    assert float(shown[1]) == pytest.approx(46.336 / 23.485, rel=0.01)
    assert [float(shown[2]), float(shown[3])] == pytest.approx([mean, ideal], rel=0.01)
    without = re.search(r"takes ([\d.]+) s, about ([\d.]+) s without it", verdict.why)
    assert without is not None
    what_if = truth.step_seconds_without(0, (4, 8, 12))
    assert [float(without[1]), float(without[2])] == pytest.approx([mean, what_if], rel=0.01)
    assert verdict.cost_throughput_ratio == pytest.approx(1 - what_if / mean, rel=0.01)


def test_nothing_is_said_that_the_trace_does_not_hold(look: Look) -> None:
    verdict = look.verdict
    assert verdict is not None
    # it was slow from the first step on, and no host, no loader and no date is recorded
    assert (verdict.onset_step, verdict.hosts) == (None, ())
    assert "in all 39 steps compared" in verdict.what
    texts = [verdict.what, verdict.why, verdict.next, *verdict.ruled_out, *look.answer.notes]
    texts += [fact.text for fact in verdict.evidence]
    for words in ("worker-", "for data", "while it runs", "since step", "first slow step"):
        assert [text for text in texts if words in text] == [], words
    assert "no dates" in " ".join(look.answer.notes)
    assert look.coverage.text == "16 ranks recorded, numbered up to 60"
    assert not [f for f in look.findings if f.detector == "goodput"]
    assert (look.status, look.status_text) == ("ended", "a recording of 44 steps")


def test_one_worker_explains_it_and_not_the_last_stage(
    reading: Reading, published: dict[str, Any]
) -> None:
    replay = reading.replay
    assert [replay.ranks[row] for row in replay.slowest_ranks()] == [0]
    slowest = replay.of_ranks(replay.slowest_ranks())
    assert share_of(replay, slowest) == pytest.approx(published["mw"]["Mw"], abs=0.02)
    last = of_last_stage(replay)
    assert share_of(replay, last) == pytest.approx(published["ms"]["Ms"], abs=0.01)
    others = [slowdown_of(replay, replay.of_ranks([row])) for row in range(1, 16)]
    assert max(others) < 1.01


def test_the_verdict_is_the_worker(look: Look) -> None:
    assert look.verdict is not None
    assert (look.verdict.detector, look.verdict.ranks) == ("straggler", (0,))
    assert "is 2.4\N{MULTIPLICATION SIGN} slower than its 3 peers" in look.verdict.what
    assert look.verdict.cost_throughput_ratio == pytest.approx(1 - 1 / 2.02, abs=0.02)
    stragglers = [f for f in look.findings if f.detector == "straggler"]
    assert [f.ranks for f in stragglers] == [(0,)]


def test_no_stage_is_blamed(look: Look) -> None:
    assert not [f for f in look.findings if f.detector == "pipeline"]
    status = next(status for status in look.detectors if status.name == "pipeline")
    assert status.state == "ran"


def test_ranks_relabelled_and_times_scaled_give_the_same_measures(
    trace: Any, reading: Reading
) -> None:
    columns = dict(trace.columns)
    columns["rank"] = 1000 - columns["rank"]
    for name in ("start_ts", "duration"):
        columns[name] = columns[name] * 7.0
    order = np.lexsort((columns["start_ts"], columns["rank"], columns["step"]))
    columns = {name: values[order] for name, values in columns.items()}
    other = type(trace)(columns, tuple(np.unique(columns["rank"]).tolist()), trace.steps)
    replay = replay_of(other).replay
    assert replay.slowdown() == pytest.approx(reading.replay.slowdown(), rel=1e-6)
    assert [replay.ranks[row] for row in replay.slowest_ranks()] == [1000]


def test_six_steps_of_it_say_the_same_with_their_uncertainty(tmp_path: Path) -> None:
    import pyarrow.compute
    import pyarrow.parquet

    if not TRACE.exists():
        pytest.skip(f"the open trace is not there: {named(TRACE)}")
    table = pyarrow.parquet.read_table(TRACE)
    first = pyarrow.array(sorted(set(table["step"].to_pylist()))[:6])
    path = tmp_path / "six.parquet"
    pyarrow.parquet.write_table(
        table.filter(pyarrow.compute.is_in(table["step"], value_set=first)), path
    )
    verdict = look_at(read_recordings([path])).verdict
    assert verdict is not None
    assert (verdict.ranks, verdict.severity, verdict.onset_step) == ((0,), "critical", None)
    assert "in each of the 6 steps recorded" in verdict.what
    # what a replay of all 44 steps gives is 0.506; of six only that S bounds it
    assert verdict.cost_throughput_ratio == pytest.approx(1 - 1 / 1.98, abs=0.01)
    assert "whether it lasts, is not known" in verdict.confidence_text


def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "trace.parquet"
    file.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(NotATrace, match=r"trace\.parquet"):
        read_open_trace(file)
    with pytest.raises(NotATrace, match=r"absent\.parquet"):
        read_open_trace(tmp_path / "absent.parquet")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"rank": [0], "step": [1]}), file)
    with pytest.raises(NotATrace, match=r"trace\.parquet: no column dp_rank, .*StragglerAnalysis"):
        read_open_trace(file)
