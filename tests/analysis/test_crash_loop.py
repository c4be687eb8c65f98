"""A job that is started again and again and dies of the same each time is not healthy."""

from __future__ import annotations

import msgspec
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look
from tests.analysis.failures import at, ended, in_attempt, raised
from tests.analysis.simulator import CALM, START_NS, Job, Recording, apply, record

APART_MS = 90_000  # from one attempt's begin to the next one's
ILLEGAL = ("RuntimeError", "CUDA error: an illegal memory access was encountered")
FULL = ("OSError", "[Errno 28] No space left on device")
STEPS = 45


def recording(steps: int, num_hosts: int = 1) -> Recording:
    return record(Job(num_ranks=4, num_hosts=num_hosts, noise=CALM, steps=steps))


def fails(number: int, rank: int, cause: tuple[str, str]) -> list[schema.AnyRecord]:
    """Return how a rank fails and the others are stopped a second later."""
    found: list[schema.AnyRecord] = [raised(rank, 0, *cause)]
    found.append(ended(rank, 100, reason="exception", exit_code=1))
    found += [
        ended(other, 1_000, reason="signal", signal=15) for other in range(4) if other != rank
    ]
    by_ns = number * APART_MS * 10**6
    return [
        msgspec.structs.replace(one, attempt=number, time_ns=one.time_ns + by_ns) for one in found
    ]


def look_at(
    failures: list[tuple[int, tuple[str, str]]], steps: int = 30, num_hosts: int = 1
) -> Look:
    """Return what is said while the attempt after some that failed has done some steps."""
    state, whole = RunState("run"), recording(STEPS, num_hosts)
    for number, (rank, cause) in enumerate(failures):
        apply(state, in_attempt(number, whole.items(), number * APART_MS))
        for one in fails(number, rank, cause):
            state.apply_record(one)
        state.look(at(2_000 + number * APART_MS))
    count = len(failures)
    newest = recording(steps, num_hosts)
    apply(state, in_attempt(count, newest.items(), count * APART_MS))
    apply(state, in_attempt(count, newest.states(newest.last_ms), count * APART_MS))
    now_ms = newest.last_ms + count * APART_MS
    return state.look(START_NS + int(now_ms * 1e6))


@pytest.mark.parametrize("count", [2, 5])
def test_attempts_that_fail_alike_are_named_with_what_they_cost(count: int) -> None:
    look = look_at([(2, ILLEGAL)] * count)
    verdict = look.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.severity, verdict.ranks) == ("crash_loop", "critical", (2,))
    assert look.answer.state == "culprit"
    assert look.answer.text.startswith(f"{count} attempts in a row failed alike: rank 2")
    assert "illegal memory access" in look.answer.text
    assert verdict.cost_throughput_ratio is not None
    assert look.cost is not None
    again_seconds = look.cost.parts["restart"] + look.cost.parts["lost work"]
    assert verdict.cost_throughput_ratio == pytest.approx(
        again_seconds / look.cost.wall_seconds, rel=1e-6
    )
    assert look.status == "running"


def test_one_error_on_another_rank_each_time_names_no_rank() -> None:
    verdict = look_at([(0, FULL), (1, FULL), (3, FULL)]).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("crash_loop", ())
    assert verdict.what.startswith("3 attempts in a row failed alike")


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [
        ((2, 3, 2, 3), ("node-1",)),
        ((2, 3, 2), ()),  # of two hosts three failures are on one by chance in a quarter
        ((2, 3, 2, 0), ()),
        ((2, 2, 2, 2), ("node-1",)),  # of the rank, which alone it says nothing of
    ],
)
def test_a_host_is_what_they_share_where_other_ranks_of_it_fail_each_time(
    ranks: tuple[int, ...], hosts: tuple[str, ...]
) -> None:
    look = look_at([(rank, FULL) for rank in ranks], num_hosts=2)
    verdict = look.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.hosts) == ("crash_loop", hosts)
    assert verdict.ranks == ((2,) if set(ranks) == {2} else ())
    assert ("each time another rank of node-1" in verdict.why) == (ranks == (2, 3, 2, 3))


def test_only_the_newest_in_a_row_count() -> None:
    verdict = look_at([(1, FULL), (2, ILLEGAL), (2, FULL)]).verdict
    assert verdict is not None
    assert verdict.what.startswith("2 attempts in a row failed alike: rank 2")


@pytest.mark.parametrize("failures", [[(2, ILLEGAL)], [(1, FULL), (2, ILLEGAL)]])
def test_failures_that_have_nothing_in_common_are_no_loop_but_what_they_cost_is_said(
    failures: list[tuple[int, tuple[str, str]]],
) -> None:
    look = look_at(failures)
    assert look.verdict is None
    assert look.answer.state == "advice"
    assert "into restarts and steps done again" in look.answer.text


def test_an_attempt_that_gets_further_ends_the_loop() -> None:
    kinds = {f.kind for f in look_at([(2, ILLEGAL)] * 3, steps=STEPS + 1).findings
             if f.attempt == 3}  # fmt: skip
    assert "crash_loop" not in kinds
    assert "goodput" in kinds


def test_a_newest_attempt_that_fails_alike_explains_the_loop() -> None:
    state, whole = RunState("run"), recording(STEPS)
    for number in range(3):
        apply(state, in_attempt(number, whole.items(), number * APART_MS))
        for one in fails(number, 2, ILLEGAL):
            state.apply_record(one)
        look = state.look(at(2_000 + number * APART_MS))
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.attempt) == ("crash", 2)
    assert [folded.key for folded in look.verdict.folded] == ["2/goodput/crash-loop"]
    (loop,) = [f for f in look.findings if f.kind == "crash_loop" and f.attempt == 2]
    assert loop.what.startswith("3 attempts in a row failed alike")
