"""The open trace AR of ByteDance's StragglerAnalysis against the figures that came with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.chunk import decode_chunk
from rankscope_server.analysis import Look, RunState
from rankscope_server.readers.open_trace import NotATrace, Reading, read_open_trace, replay_of
from rankscope_server.readers.open_trace_records import records_of
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
def look(trace: Any, reading: Reading) -> Look:
    state = RunState("AR")
    records, chunks = records_of(trace, reading, 10**18)
    for record in records:
        state.apply_record(record)
    for chunk, _ in chunks:
        state.apply_chunk(chunk, decode_chunk(chunk.data))
    return state.look(2 * 10**18)


def test_the_trace_is_read_whole(trace: Any, reading: Reading) -> None:
    assert len(trace.columns["step"]) == 117_216
    assert (len(trace.ranks), len(trace.steps)) == (16, 44)
    assert abs(reading.replay.error_ratio()) < 0.02


def test_slowdown_is_the_published_one(reading: Reading, published: dict[str, Any]) -> None:
    replay, result = reading.replay, published["result"]
    assert result["blocking_slowdown"] == pytest.approx(1.973, abs=0.001)
    assert replay.slowdown() == pytest.approx(result["blocking_slowdown"], rel=0.02)
    for kind in ("backward-compute", "forward-compute", "grads-reduce-scatter", "optimizer"):
        truth = result["blocking_decompose_by_optype"][kind]
        assert replay.slowdown_of_kind(kind) == pytest.approx(truth, rel=0.02), kind


def test_one_worker_explains_it_and_not_the_last_stage(
    reading: Reading, published: dict[str, Any]
) -> None:
    replay = reading.replay
    assert [replay.ranks[row] for row in replay.slowest_ranks()] == [0]
    assert replay.share_of_slowest_ranks() == pytest.approx(published["mw"]["Mw"], abs=0.02)
    assert replay.share_of_last_stage() == pytest.approx(published["ms"]["Ms"], abs=0.01)
    others = [replay.slowdown_of_rank(row) for row in range(1, 16)]
    assert max(others) < 1.01


def test_the_verdict_is_the_worker(look: Look) -> None:
    assert look.verdict is not None
    assert (look.verdict.detector, look.verdict.ranks) == ("straggler", (0,))
    assert "2.4 times" in look.verdict.what
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


def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "trace.parquet"
    file.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(NotATrace, match=r"trace\.parquet"):
        read_open_trace(file)
    with pytest.raises(NotATrace, match=r"absent\.parquet"):
        read_open_trace(tmp_path / "absent.parquet")
