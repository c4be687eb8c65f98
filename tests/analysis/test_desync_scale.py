"""Desync among many ranks in nested groups, with clocks, loss and another order of everything."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import say
from tests.simulator.delivery import apply, deliver, relabelled, shuffled
from tests.simulator.job import Fault, FaultKind, Job, Noise
from tests.simulator.records import MS, START_NS, Item, Recording

VERBS: dict[FaultKind, str] = {
    "skip": "skipped", "insert": "inserted", "swap": "swapped", "shape": "wrong shape",
    "dtype": "wrong dtype", "operation": "in place of", "reduce_op": "wrong reduce operation",
}  # fmt: skip


def job_with(kind: FaultKind, num_ranks: int, seed: int) -> Job:
    chance = random.Random(f"{kind} {num_ranks} {seed}")
    data, tensor, pipeline = {
        16: [(4, 2, 2), (8, 1, 2), (16, 1, 1)], 64: [(8, 2, 4)], 1024: [(16, 8, 8)],
    }[num_ranks][seed % (3 if num_ranks == 16 else 1)]  # fmt: skip
    fault = Fault(kind, chance.randrange(num_ranks), 8, steps=1, bucket=chance.randrange(3))
    return Job(
        data=data, tensor=tensor, pipeline=pipeline, steps=14, microbatches=2, seed=seed,
        ranks_per_host=4, faults=(fault,), noise=Noise(clock_offset_ms=200.0),
    )  # fmt: skip


def all_items(job: Job) -> tuple[list[Item], int]:
    """Return everything up to 8 s after the last move, and the time of the look, ns."""
    recording = Recording(job)
    items = list(recording.items(per_chunk=3))
    at_ms = recording.stopped_ms() + 8_000
    return [*items, *recording.states(at_ms)], START_NS + int((at_ms + 6_000) * MS)


def look_at(items: list[Item], now_ns: int) -> Look:
    state = RunState("simulated")
    apply(state, items)
    return state.look(now_ns)


def desyncs(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.kind == "desync"]


def accused(look: Look) -> set[int]:
    return {rank for f in look.findings if f.severity != "info" for rank in f.ranks}


@pytest.mark.parametrize("kind", VERBS)
def test_the_culprit_and_what_it_did_are_named_and_nobody_else(kind: FaultKind) -> None:
    for seed in range(3):
        job = job_with(kind, 16, seed)
        items, now_ns = all_items(job)
        look = look_at(deliver(items, seed, lost=0.0), now_ns)
        (finding,) = desyncs(look)
        assert finding.ranks == (job.faults[0].rank,), (seed, finding.what)
        assert VERBS[kind] in finding.what, (seed, finding.what)
        assert accused(look) == {job.faults[0].rank}, [f.what for f in look.findings]
        assert look.verdict is not None
        assert look.verdict.kind == "desync"  # the hang behind it is folded under it
        assert all(f.explained_by == finding.key for f in look.findings if f.kind == "hang")


@pytest.mark.parametrize("kind", VERBS)
def test_with_lost_chunks_no_healthy_rank_is_accused(kind: FaultKind) -> None:
    found = 0
    for seed in range(4):
        job = job_with(kind, 64, seed)
        items, now_ns = all_items(job)
        look = look_at(deliver(items, seed), now_ns)
        assert accused(look) <= {job.faults[0].rank}, [f.what for f in look.findings]
        found += bool(desyncs(look))
    say(f"desync {kind} among 64 with 1 % of the chunks lost: {found} of 4 found")
    assert found >= 3


def test_a_thousand_ranks_are_compared_in_a_fraction_of_a_second() -> None:
    for seed, kind in enumerate(("skip",)):
        job = job_with(kind, 1024, seed)  # type: ignore[arg-type]
        items, now_ns = all_items(job)
        state = RunState("thousand")
        apply(state, items)
        for attempt in state._attempts.values():
            attempt.take_waiting()
        began = time.process_time()
        look = state.look(now_ns)
        took = time.process_time() - began
        (finding,) = desyncs(look)
        say(f"desync {kind} among 1,024: {took:.2f} s for the look of all detectors")
        assert finding.ranks == (job.faults[0].rank,)
        assert VERBS[kind] in finding.what  # type: ignore[index]
        assert took < 2.0


@pytest.mark.parametrize("kind", ["skip", "swap", "shape", "hang"])
def test_order_doubles_labels_clocks_and_speed_change_no_finding(kind: FaultKind) -> None:
    job = job_with("skip", 64, 1)
    fault = dataclasses.replace(job.faults[0], kind=kind)
    job = dataclasses.replace(job, faults=(fault,))
    items, now_ns = all_items(job)
    plain = look_at(items, now_ns)

    def said(look: Look, rank: dict[int, int] | None = None) -> list[tuple[object, ...]]:
        return sorted(
            (f.kind, f.severity, tuple(sorted(rank[r] if rank else r for r in f.ranks)),
             f.group, f.onset_step, f.explained_by is None)
            for f in look.findings if f.severity != "info"
        )  # fmt: skip

    assert said(plain)
    assert said(look_at(shuffled([*items, *items[::3]], 5), now_ns)) == said(plain)
    order = list(range(64))
    random.Random(3).shuffle(order)
    back = {new: old for old, new in enumerate(order)}
    assert said(look_at(relabelled(items, order), now_ns), back) == said(plain)
    still = dataclasses.replace(job, noise=dataclasses.replace(job.noise, clock_offset_ms=0.0))
    assert said(look_at(*all_items(still))) == said(plain)
    slow = dataclasses.replace(job, forward_ms=3 * job.forward_ms, data_ms=3.0, optimizer_ms=9.0)
    assert said(look_at(*all_items(slow))) == said(plain)
