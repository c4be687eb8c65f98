"""The summary of a trace: own and total times, in bounded memory, of whatever file there is."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from rankscope.node.upload import trace_summary as trace_summary
from rankscope.node.upload.trace_summary import summarise


def event(name: str, begin: float, length: float, tid: int = 1, cat: str = "cpu_op") -> dict:  # type: ignore[type-arg]
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "tid": tid, "pid": 9}


def write(path: Path, events: list[object]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "more": [1]}, indent=1))
    return path


def test_own_time_is_without_what_ran_inside(tmp_path: Path) -> None:
    events = [
        event("inner", 2, 3),
        event("outer", 0, 10),  # not in the order of time, as kineto writes them
        event("inner", 6, 2),
        event("inner", 2, 3, tid=2),  # another thread: not inside
        event("kernel", 0, 50, cat="kernel"),
        {"ph": "i", "name": "marker", "ts": 1},
        event("python", 0, 99, cat="python_function"),
    ]
    rows = {row.name: row for row in summarise(write(tmp_path / "t.json", events))}
    assert rows["outer"].total_ns, rows["outer"].self_ns == (10_000, 5_000)
    assert (rows["inner"].count, rows["inner"].total_ns, rows["inner"].self_ns) == (3, 8000, 8000)
    assert (rows["kernel"].total_ns, rows["kernel"].self_ns) == (50_000, -1)
    assert set(rows) == {"outer", "inner", "kernel"}


def test_blocks_cut_events_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.json", [event(f"op{n % 7}", n, 1) for n in range(300)])
    whole = summarise(path)
    for size in (1, 13, 100):
        monkeypatch.setattr(trace_summary, "_BLOCK", size)
        assert summarise(path) == whole
    assert sum(row.count for row in whole) == 300


def test_memory_is_bounded_whatever_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_summary, "_MAX_NESTED", 1000)
    path = write(tmp_path / "t.json", [event(f"op{n}", n, 1) for n in range(60_000)])
    assert path.stat().st_size > 6_000_000
    tracemalloc.start()
    rows = summarise(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert {row.self_ns for row in rows} == {-1}  # more than it looked at: not known


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "X"', "\x00\xff" * 100])
def test_what_is_no_trace_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text, errors="replace")
    with pytest.raises(ValueError, match=r"no traceEvents|breaks off"):
        summarise(path)
