"""Chunks of several ranks give the findings that chunks of one rank each give."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import RANK, encode_chunk
from rankscope_server.analysis.state import RunState
from tests.simulator.delivery import apply, as_validated, together
from tests.simulator.job import Fault, Job
from tests.simulator.records import MS, START_NS, Item, Recording

JOBS = {
    "healthy": Job(data=8, steps=60),
    "slow rank": Job(data=8, steps=120,
                     faults=(Fault("slow_compute", rank=5, size=0.6, start=50),)),
    "hang": Job(data=2, tensor=2, pipeline=2, steps=30,
                faults=(Fault("hang", rank=3, start=20),)),
    "pipeline": Job(data=2, tensor=2, pipeline=2, steps=60),
}  # fmt: skip


def alone(items: list[Item]) -> list[Item]:
    """Return items with every chunk encoded for itself."""
    return [
        (arrival, (msgspec.structs.replace(what[0], data=encode_chunk(what[1])), what[1]))
        if isinstance(what, tuple) and what[0].rank >= 0
        else (arrival, what)
        for arrival, what in items
    ]


def as_ingested(items: list[Item]) -> list[Item]:
    """Return items as a server takes them: chunks read again, with their index fields."""
    found: list[Item] = []
    for arrival, what in items:
        if isinstance(what, tuple) and what[0].rank >= 0:
            judged = as_validated(what[0])
            what = judged.chunk, judged.columns
        found.append((arrival, what))
    return found


def look_at(recording: Recording, items: list[Item]) -> dict[str, Any]:
    state = RunState("run")
    apply(state, as_ingested(items))
    at_ms = recording.stopped_ms() + 40_000
    apply(state, recording.states(at_ms))
    look = state.look(START_NS + int(at_ms * MS))
    findings = sorted((msgspec.to_builtins(one) for one in look.findings), key=str)
    return {
        "answer": msgspec.to_builtins(look.answer), "coverage": msgspec.to_builtins(look.coverage),
        "status": look.status, "findings": findings,
    }  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_findings_are_the_same(name: str) -> None:
    recording = Recording(JOBS[name])
    items = list(recording.items())
    joined = together(items)
    shapes = [what for _, what in joined if isinstance(what, tuple) and RANK in what[1]]
    assert shapes
    assert max(len(set(np.asarray(columns[RANK]).tolist())) for _, columns in shapes) == 8
    expected = look_at(recording, alone(items))
    assert look_at(recording, joined) == expected
    assert bool(expected["findings"]) is (name in ("slow rank", "hang"))


def test_a_rank_is_not_alive_for_its_neighbours_in_the_chunk() -> None:
    """The chunk of a node ends with the last event of its ranks; one of them stopped before."""
    recording = Recording(Job(data=4, steps=40))
    items = [
        (arrival, what)
        for arrival, what in recording.items()
        if not isinstance(what, schema.RankState)
    ]
    ends: dict[int, dict[int, int | None]] = {}
    for place, chosen in enumerate((alone(items), together(items))):
        state = RunState("run")
        apply(state, as_ingested(chosen))
        attempt = state._attempts[0]
        ends[place] = {rank: attempt.seen_ns(rank) for rank in range(4)}
    assert ends[0] == ends[1]
    assert len(set(ends[0].values())) > 1
