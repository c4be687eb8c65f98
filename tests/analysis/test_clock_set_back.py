"""A clock that is set back makes no rank silent and hides no hang."""

from __future__ import annotations

import random

import msgspec
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.observe.latest_states import LatestStates
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import CALM, MS, START_NS, Fault, Item, Job, Recording, apply, record

BACK_NS = 60 * 10**9
HOST_RANKS = (2, 3)  # of the host whose clock is set back


def set_back(items: list[Item], from_ms: float) -> list[Item]:
    """Return items with the clock of one host set back at a time."""
    since_ns = START_NS + int(from_ms * MS)
    found: list[Item] = []
    for arrival, what in items:
        if isinstance(what, tuple):
            chunk, columns = what
            if chunk.rank in HOST_RANKS:
                name = "started_ns" if chunk.kind == "steps" else "arrived_ns"
                times = columns[name] - BACK_NS * (columns[name] >= since_ns)
                chunk = msgspec.structs.replace(
                    chunk, time_lo_ns=int(times.min()), time_hi_ns=int(times.max())
                )
                what = chunk, columns | {name: times}
        elif what.rank in HOST_RANKS and what.time_ns >= since_ns:
            what = earlier(what, since_ns)
        found.append((arrival, what))
    return found


def earlier(record: schema.AnyRecord, since_ns: int) -> schema.AnyRecord:
    def back(time_ns: int) -> int:
        return time_ns - BACK_NS * (time_ns >= since_ns)

    if not isinstance(record, schema.RankState):
        return msgspec.structs.replace(record, time_ns=back(record.time_ns))
    return msgspec.structs.replace(
        record, time_ns=back(record.time_ns), phase_since_ns=back(record.phase_since_ns),
        heartbeat_ns=back(record.heartbeat_ns),
        groups=[
            msgspec.structs.replace(
                group, issued_ns=back(group.issued_ns), open_ns=back(group.open_ns)
            )
            for group in record.groups
        ],
    )  # fmt: skip


def watched(recording: Recording, from_ms: float, until_ms: float) -> Look:
    """Return the last of the looks of each second."""
    state, items = RunState("run"), sorted(set_back(recording.items(), from_ms), key=lambda i: i[0])
    at = 0
    for now_ms in range(1_000, int(until_ms), 1_000):
        now_ns = START_NS + now_ms * MS
        coming = [item for item in items[at:] if item[0] <= now_ns]
        at += len(coming)
        apply(state, [*coming, *set_back(recording.states(now_ms), from_ms)])
        look = state.look(now_ns)
    return look


def test_a_run_stays_healthy() -> None:
    recording = record(Job(num_ranks=4, num_hosts=2, steps=300, noise=CALM))
    look = watched(recording, from_ms=10_000, until_ms=recording.last_ms)
    assert look.coverage.reporting == 4
    assert not look.coverage.silent
    assert look.verdict is None or look.verdict.kind == "clock_offset"


@pytest.mark.parametrize("rank", [1, 2])
def test_a_hang_is_named_as_soon_as_on_clocks_that_run_on(rank: int) -> None:
    recording = record(
        Job(num_ranks=4, num_hosts=2, steps=300, noise=CALM, faults=(Fault("hang", rank, 200),))
    )
    look = watched(recording, from_ms=10_000, until_ms=recording.last_ms + 8_000)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("hang", (rank,))
    assert set(look.verdict.victims) == set(range(4)) - {rank}
    assert look.coverage.reporting == 4


def at(time_s: int, step: int, issued: int) -> schema.RankState:
    return schema.RankState(
        attempt=0, rank=0, time_ns=time_s * 10**9, step=step, phase="forward",
        phase_since_ns=0, heartbeat_ns=0,
        groups=[schema.GroupState(group="world", issued=issued, ended=issued)],
    )  # fmt: skip


STATES = {
    "in order": ([at(1, 1, 3), at(2, 2, 6), at(3, 3, 9)], 2),
    "clock set back": ([at(100, 10, 30), at(101, 11, 33), at(41, 12, 36), at(42, 12, 37)], 3),
    "clock shows the old time again": ([at(100, 10, 30), at(41, 12, 36), at(102, 70, 210)], 2),
    "steps numbered anew": ([at(1, 90, 270), at(2, 91, 273), at(3, 1, 276)], 2),
}


@pytest.mark.parametrize(("states", "last"), STATES.values(), ids=STATES)
def test_the_state_of_now_in_any_order(states: list[schema.RankState], last: int) -> None:
    chance = random.Random(3)
    for _ in range(12):
        latest = LatestStates()
        for state in chance.sample(states, len(states)):
            latest.take(state)
        assert latest.by_rank[0] == states[last]


def test_of_another_process_the_latest_counts() -> None:
    old, new = at(5, 90, 270), at(9, 1, 3)
    for first, second in ((old, new), (new, old)):
        latest = LatestStates()
        latest.take(first)
        latest.begin_again(0)
        latest.take(second)
        assert latest.by_rank[0] == new
