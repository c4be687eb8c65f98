"""Ranks on a device that tells no ends: what each entered last is all that is known.

So it is with NCCL before PyTorch 2.14, until the Flight Recorder is asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from rankscope import schema
from rankscope_server.analysis import Finding, RunState
from tests.analysis.simulator import CALM, MS, START_NS, Fault, Item, Job, Recording, apply, record

LATE_MS = 12_000.0


def untold(recording: Recording, now_ms: float) -> list[Item]:
    """Return where all ranks are, without any end: the oldest operations count as open."""
    items: list[Item] = []
    for _, state in recording.states(now_ms):
        assert isinstance(state, schema.RankState)
        issued = [
            one for one in recording.machine.ranks[state.rank].issued if one.issued_ms <= now_ms
        ]
        groups = []
        for group in state.groups:
            mine = [one for one in issued if one.group == group.group]
            exchanges = [one for one in mine if one.peer >= 0]
            peers = [
                schema.PeerState(
                    peer=peer,
                    sent=sum(one.peer == peer and one.operation == "send" for one in exchanges),
                    received=sum(one.peer == peer and one.operation == "recv" for one in exchanges),
                )
                for peer in sorted({one.peer for one in exchanges})
            ]
            first = next((one for one in mine if one.peer < 0), None)
            told = {"ended": 0, "peers": peers}
            if first is not None:
                told |= {
                    "open_sequence": 1, "open_operation": first.operation,
                    "open_ns": recording.clock_ns(state.rank, first.issued_ms),
                }  # fmt: skip
            if exchanges:
                told |= {
                    "p2p_operation": exchanges[0].operation, "p2p_peer": exchanges[0].peer,
                    "p2p_sequence": 1,
                    "p2p_issued_ns": recording.clock_ns(state.rank, exchanges[0].issued_ms),
                }  # fmt: skip
            groups.append(msgspec.structs.replace(group, **told))
        at = START_NS + int(now_ms * MS)
        items.append((at, msgspec.structs.replace(state, groups=groups)))
    return items


def on_device(items: Iterable[Item]) -> list[Item]:
    """Return what ranks over NCCL would have said of themselves."""
    return [
        (at, msgspec.structs.replace(what, backend="nccl"))
        if isinstance(what, schema.RankRegistered)
        else (at, what)
        for at, what in items
    ]


def without_ends(items: Iterable[Item]) -> list[Item]:
    """Return `items` with the collectives as they are issued, and no more."""
    found: list[Item] = []
    for at, what in items:
        if isinstance(what, tuple) and what[0].kind == "collectives":
            rows = np.full(what[0].count, -1), np.full(what[0].count, schema.RETURNED)
            columns = dict(zip(("duration_ns", "state"), rows, strict=True))
            found.append((at, (what[0], {**what[1], **columns})))
        else:
            found.append((at, what))
    return found


def hangs(recording: Recording) -> list[Finding]:
    state, at_ms = RunState("run"), recording.last_ms + LATE_MS
    apply(state, without_ends(on_device(recording.items())))
    apply(state, untold(recording, at_ms))
    look = state.look(START_NS + int(at_ms * MS))
    return [finding for finding in look.findings if finding.kind == "hang"]


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_hung_rank_is_named(num_stages: int) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        fault = Fault("hang", chance.randrange(4), chance.randint(3, 80))
        (finding,) = hangs(
            record(Job(num_stages=num_stages, seed=seed, steps=90, faults=(fault,)))
        )
        assert finding.ranks == (fault.rank,), seed
        assert set(finding.victims) == set(range(4)) - {fault.rank}, seed


def test_nested_groups_name_one_rank_of_thirty_two() -> None:
    for seed in range(12):
        chance = random.Random(seed)
        fault = Fault("hang", chance.randrange(32), 12, microbatch=chance.randrange(-1, 4))
        job = Job(num_ranks=32, num_stages=4, num_hosts=4, seed=seed, steps=15, noise=CALM,
                  faults=(fault,), clock_error_ms=40.0)  # fmt: skip
        (finding,) = hangs(record(job))
        assert finding.ranks == (fault.rank,), (seed, fault)


def test_two_roots_are_both_named() -> None:
    faults = (Fault("hang", 3, 12), Fault("hang", 13, 12))
    job = Job(num_ranks=16, num_stages=2, steps=15, noise=CALM, faults=faults)
    assert {rank for finding in hangs(record(job)) for rank in finding.ranks} == {3, 13}


def test_where_all_have_entered_nobody_is_named() -> None:
    """A link that broke: each rank has issued as much as the others, and none moves."""
    recording = record(Job(steps=40))
    at_ms = recording.last_ms / 2
    states = untold(recording, at_ms)
    most = max(group.issued for _, state in states for group in state.groups)  # type: ignore[union-attr]
    state, late_ms = RunState("run"), at_ms + 200_000.0
    apply(state, [one for one in without_ends(on_device(recording.items())) if one[0] <= START_NS + at_ms * MS])
    for at, told in states:
        assert isinstance(told, schema.RankState)
        groups = [
            msgspec.structs.replace(one, issued=most, issued_ns=told.heartbeat_ns)
            for one in told.groups
        ]
        late_ns = told.time_ns + int(200_000.0 * MS)
        apply(state, [(at, msgspec.structs.replace(told, time_ns=late_ns, groups=groups))])
    look = state.look(START_NS + int(late_ms * MS))
    (finding,) = [one for one in look.findings if one.kind == "hang"]
    assert finding.ranks == ()
    assert "all 4 members have entered it" in finding.what


def test_without_ends_nobody_is_called_healthy() -> None:
    """All take the same time a step there, a slow one too."""
    recording = record(Job(steps=60, noise=CALM))
    items, at_ms = on_device(recording.items()), recording.last_ms + 1.0
    answers = []
    for told in (items, without_ends(items)):
        state = RunState("run")
        apply(state, told)
        apply(state, recording.states(at_ms))
        answers.append(state.look(START_NS + int(at_ms * MS)).answer)
    assert [answer.state for answer in answers] == ["healthy", "unknown"]
    assert answers[1].text == (
        "No verdict: Ranks 0 to 3: what their devices waited for is not known"
    )
    assert answers[1].deciding[0].startswith("PyTorch 2.14 or newer")
