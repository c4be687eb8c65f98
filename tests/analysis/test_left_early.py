"""Ranks that go on, or end well, without collectives that the others wait in."""

from __future__ import annotations

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.collective_columns import columns_of
from tests.analysis.records import grouped, registered
from tests.analysis.simulator import START_NS

SECOND = 10**9


def findings(
    issued: list[int], steps: list[int], reasons: dict[int, str] | None = None, *, is_open: bool
) -> list[Finding]:
    """Return the desync findings of ranks that made so many calls and are in such steps."""
    state = RunState("run")
    now_ns = START_NS + 120 * SECOND
    for rank, (count, step) in enumerate(zip(issued, steps, strict=True)):
        who = {"attempt": 0, "rank": rank}
        state.apply_record(registered(**who, world_size=len(issued), host="a", backend="gloo"))
        state.apply_record(grouped(**who, ranks=range(len(issued))))
        times = np.arange(count) * 10.0
        columns: dict[str, Column] = columns_of(times, times + 1)
        columns["group"] = ["0"] * count
        state.apply_chunk(
            schema.Chunk(kind="collectives", attempt=0, rank=rank, host="a", count=count,
                         time_lo_ns=START_NS, time_hi_ns=now_ns, data=encode_chunk(columns)),
            columns,
        )  # fmt: skip
        waits = is_open and count == max(issued)
        standing = schema.GroupState(
            group="0", issued=count, ended=count - waits, operation="all_reduce",
            open_sequence=count if waits else 0, open_operation="all_reduce" if waits else "",
            open_ns=now_ns - 60 * SECOND if waits else 0,
        )  # fmt: skip
        state.apply_record(schema.RankState(
            **who, time_ns=now_ns, step=step, phase="backward", phase_since_ns=START_NS,
            heartbeat_ns=now_ns, alive=True, groups=[standing],
        ))  # fmt: skip
        reason = (reasons or {}).get(rank)
        if reason:
            state.apply_record(schema.RankEnded(
                **who, time_ns=now_ns, reason=reason, exit_code=0 if reason == "clean" else 1,
            ))  # fmt: skip
    return [
        finding for finding in state.look(now_ns + SECOND).findings if finding.detector == "desync"
    ]


def test_a_rank_that_ended_well_before_the_others_broke() -> None:
    ends = {0: "exception", 1: "exception", 2: "clean", 3: "exception"}
    (found,) = findings([40, 40, 36, 40], [10, 10, 50, 10], ends, is_open=False)
    assert (found.kind, found.ranks, found.severity) == ("desync", (2,), "critical")
    assert found.onset_step == 10
    assert "#37" in found.why


def test_a_rank_that_goes_on_to_later_steps() -> None:
    (found,) = findings([40, 40, 36, 40], [10, 10, 14, 10], is_open=True)
    assert found.ranks == (2,)
    assert "is in step 14" in found.what


def test_a_rank_that_is_merely_late_is_not_accused() -> None:
    assert findings([40, 40, 36, 40], [10, 10, 9, 10], is_open=True) == []


def test_a_job_that_ended_well_is_left_alone() -> None:
    ends = dict.fromkeys(range(4), "clean")
    assert findings([40, 40, 36, 40], [10, 10, 10, 10], ends, is_open=False) == []
