"""Ranks on a device that tells no ends: what each entered last is all that is known.

So it is with NCCL before PyTorch 2.14, until the Flight Recorder is asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk, encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.verdict.answers import Look
from tests.analysis.program import Rank
from tests.analysis.simulator import (
    CALM,
    HEAVY,
    MS,
    START_NS,
    Fault,
    Item,
    Job,
    Noise,
    Recording,
    apply,
    record,
)
from tests.analysis.watchdog import SIGNALS, gives_up

LATE_MS = 12_000.0
FOLDER = Path(__file__).parent / "data" / "h200"
SHORT = FOLDER / "fsdp-slow-gpu-short.msgpack"  # too few measured steps before the fault
FILES = sorted(set(FOLDER.glob("*.msgpack")) - {SHORT})


def unclear(recording: Recording, now_ms: float) -> list[Item]:
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
                    sent=sum(
                        exchange.peer == peer and exchange.operation == "send"
                        for exchange in exchanges
                    ),
                    received=sum(
                        exchange.peer == peer and exchange.operation == "recv"
                        for exchange in exchanges
                    ),
                )
                for peer in sorted({exchange.peer for exchange in exchanges})
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


def on_device(
    recording: Recording, *, is_ddp: bool = True, operation: str = "all_reduce"
) -> list[Item]:
    """Return what ranks over NCCL say: hosts that hardly wait, collectives without an end.

    Where it is not DDP, the script itself issues them, all as one `operation` if that is given.
    """
    items: list[Item] = []
    for at, what in recording.items():
        if isinstance(what, schema.RankRegistered):
            items.append((at, msgspec.structs.replace(what, backend="nccl")))
        elif not isinstance(what, tuple):
            items.append((at, what))
        elif what[0].kind == "steps":
            blocked = {name: 0 * np.asarray(what[1][name]) for name in what[1] if "blocked" in name}
            items.append((at, (what[0], {**what[1], **blocked})))
        else:
            rows = np.full(what[0].count, -1), np.full(what[0].count, schema.RETURNED)
            columns = dict(zip(("duration_ns", "state"), rows, strict=True))
            exchanges = np.asarray(what[1]["flags"]) & schema.FLAG_P2P
            columns["flags"] = exchanges | (schema.FLAG_BY_ENGINE if is_ddp else 0)
            if operation:
                columns["operation"] = [operation] * what[0].count  # type: ignore[assignment]
            columns = {**what[1], **columns}
            chunk = msgspec.structs.replace(what[0], data=encode_chunk(columns))
            items.append((at, (chunk, columns)))
    return items


def each_fourth(step: int) -> bool:
    return step % 4 == 0


def each_second_then_eighth(step: int) -> bool:
    """The agent's way with long steps that cost much to measure."""
    return step % (2 if step <= 128 else 8) == 0


def measured(
    recording: Recording, *, knows_waits: bool = False,
    is_taken: Callable[[int], bool] = each_fourth,
) -> list[Item]:  # fmt: skip
    """Return the phases of some steps as the devices had them, and their waits if known."""
    items: list[Item] = []
    for at, what in recording.items():
        if not isinstance(what, tuple) or what[0].kind != "steps":
            continue
        rows = {name: np.asarray(what[1][name]) for name in what[1]}
        for place in [at for at, step in enumerate(rows["step"]) if is_taken(int(step))]:
            values = {
                f"gpu_{phase}_seconds": float(rows[f"{phase}_ns"][place]) / 1e9
                for phase in schema.PHASES
            }
            if knows_waits:
                values |= {
                    f"gpu_{phase}_wait_seconds": float(rows[f"{phase}_blocked_ns"][place]) / 1e9
                    for phase in ("other", "forward", "backward", "optimizer")
                }
            items.append((at, schema.Metrics(
                attempt=0, rank=what[0].rank, time_ns=int(rows["started_ns"][place]),
                step=int(rows["step"][place]), values=values,
            )))  # fmt: skip
    return items


def looked_at(recording: Recording, *items: list[Item]) -> Look:
    state, at_ms = RunState("run"), recording.last_ms + 1.0
    for some in items:
        apply(state, some)
    apply(state, recording.states(at_ms))
    return state.look(START_NS + int(at_ms * MS))


def hangs(recording: Recording) -> list[Finding]:
    state, at_ms = RunState("run"), recording.last_ms + LATE_MS
    apply(state, on_device(recording))
    apply(state, unclear(recording, at_ms))
    look = state.look(START_NS + int(at_ms * MS))
    return [finding for finding in look.findings if finding.kind == "hang"]


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_hung_rank_is_named(num_stages: int) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        fault = Fault("hang", chance.randrange(4), chance.randint(3, 80))
        (finding,) = hangs(record(Job(num_stages=num_stages, seed=seed, steps=90, faults=(fault,))))
        assert finding.ranks == (fault.rank,), seed
        assert set(finding.victims) == set(range(4)) - {fault.rank}, seed


@pytest.mark.parametrize("number", SIGNALS)
def test_a_hang_stays_the_verdict_when_its_victims_give_up(number: int) -> None:
    recording = record(Job(num_ranks=2, steps=60, faults=(Fault("hang", 1, 40),)))
    state, at_ms = RunState("run"), recording.last_ms + LATE_MS
    apply(state, on_device(recording))
    apply(state, unclear(recording, at_ms))
    (before,) = state.look(START_NS + int(at_ms * MS)).findings
    end_ns = START_NS + int((at_ms + 13_000.0) * MS)
    for told in gives_up(0, end_ns, 40, number):
        state.apply_record(told)
    state.apply_record(schema.RankEnded(
        attempt=0, rank=1, time_ns=end_ns + 61 * 10**9, reason="signal", signal=15, last_step=39,
    ))  # fmt: skip
    look = state.look(end_ns + 62 * 10**9)
    assert look.verdict is not None
    assert (look.verdict.key, look.verdict.ranks) == (before.key, (1,))
    assert named(look) == {1}


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


def stuck(recording: Recording, known: dict[int, int]) -> list[Finding]:
    """Return the hangs of a job in which each rank has issued as much as the others.

    `known` are ranks whose devices were asked, and how many of their collectives are in flight.
    """
    at_ms = recording.last_ms / 2
    states = unclear(recording, at_ms)
    most = max(group.issued for _, state in states for group in state.groups)  # type: ignore[union-attr]
    state, late_ms = RunState("run"), at_ms + 200_000.0
    apply(state, [one for one in on_device(recording) if one[0] <= START_NS + at_ms * MS])
    for at, told in states:
        assert isinstance(told, schema.RankState)
        ends: dict[str, Any] = {}
        if told.rank in known:
            ends = {"ended": most - known[told.rank], "ends_are_known": True}
        groups = [
            msgspec.structs.replace(one, issued=most, issued_ns=told.heartbeat_ns, **ends)
            for one in told.groups
        ]
        late_ns = told.time_ns + int(200_000.0 * MS)
        apply(state, [(at, msgspec.structs.replace(told, time_ns=late_ns, groups=groups))])
    look = state.look(START_NS + int(late_ms * MS))
    return [finding for finding in look.findings if finding.kind == "hang"]


@pytest.mark.parametrize("known", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_where_all_have_entered_nobody_is_named(known: tuple[int, ...]) -> None:
    """A link that broke; some devices were asked, and are in the last collective."""
    (finding,) = stuck(record(Job(steps=40)), dict.fromkeys(known, 1))
    assert finding.ranks == ()
    assert "all 4 members have entered it" in finding.what


def test_a_device_that_is_behind_is_named_among_those_that_were_asked() -> None:
    (finding,) = stuck(record(Job(steps=40)), {0: 1, 1: 1, 2: 3})
    assert finding.ranks == (2,)


def named(look: Look) -> set[int]:
    return {
        rank for finding in look.findings if finding.severity != "info" for rank in finding.ranks
    }


@pytest.mark.parametrize("kind", ["slow_compute", "slow_data"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_slow_rank_is_named_by_what_the_devices_measured(
    num_ranks: int, kind: Literal["slow_compute", "slow_data"]
) -> None:
    for seed in range(6):
        fault = Fault(kind, seed % num_ranks, 100, 0.8 + 0.1 * seed)
        recording = record(
            Job(num_ranks=num_ranks, steps=360, seed=seed, noise=CALM, faults=(fault,))
        )
        look = looked_at(recording, on_device(recording), measured(recording))
        (finding,) = [other for other in look.findings if other.severity != "info"]
        assert (finding.kind, finding.ranks) == (kind, (fault.rank,)), seed
        assert finding.onset_step is not None
        assert 100 <= finding.onset_step <= 116, seed


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_healthy_ranks_are_called_healthy(num_ranks: int) -> None:
    for seed in range(10):
        for noise in (CALM, HEAVY):
            recording = record(Job(num_ranks=num_ranks, steps=240, seed=seed, noise=noise))
            look = looked_at(recording, on_device(recording), measured(recording))
            assert named(look) == set(), seed
            assert look.answer.state == "healthy" or noise == HEAVY, seed


def test_what_one_rank_has_not_told_is_compared_with_nobody() -> None:
    recording = record(Job(steps=360, noise=CALM, faults=(Fault("slow_compute", 2, 100, 0.9),)))
    for missing in (0, 2):
        some = [one for one in measured(recording) if one[1].rank != missing]  # type: ignore[union-attr]
        look = looked_at(recording, on_device(recording), some)
        assert (look.answer.state, named(look)) == ("unknown", set())


class LogsEachFourthStep(Recording):
    """The first rank writes for 40 ms in the very steps that the devices measure."""

    def _step_row(self, rank: Rank, log: object, num_issued: Mapping[int, int]) -> dict[str, int]:
        row = super()._step_row(rank, log, num_issued)
        if row["step"] % 4 == 0:
            row["duration_ns"] += int(40 * MS)
            row["backward_ns" if rank.number else "other_ns"] += int(40 * MS)
        return row


@pytest.mark.parametrize("every", [2, 4, 8])
def test_what_happens_in_the_measured_steps_alone_accuses_nobody(every: int) -> None:
    plain = record(Job(steps=360, noise=CALM))
    logs = LogsEachFourthStep(plain.job, plain.machine)
    some = measured(logs, is_taken=lambda step: step % every == 0)
    look = looked_at(logs, on_device(logs), some)
    assert (look.answer.state, named(look)) == ("unknown", set())


def test_who_stands_out_beside_what_all_wait_in_is_named_and_no_one_is_called_healthy() -> None:
    """Collectives of the script: all wait alike in the first, for the sender alone in the other."""
    clean = record(Job(steps=360, noise=CALM))
    slow = record(Job(steps=360, noise=CALM, faults=(Fault("slow_compute", 2, 100, 0.9),)))
    for operation, ranks in (("all_reduce", {2}), ("broadcast", set())):
        look = looked_at(slow, on_device(slow, is_ddp=False, operation=operation), measured(slow))
        assert named(look) == ranks
        look = looked_at(
            clean, on_device(clean, is_ddp=False, operation=operation), measured(clean)
        )
        assert (look.answer.state, named(look)) == ("unknown", set())


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (4, 1), (4, 4), (8, 4)])
def test_where_the_waits_are_known_it_does_not_matter_who_issues_what(
    num_ranks: int, num_stages: int
) -> None:
    for seed in range(4):
        rank = seed % num_ranks
        job = Job(num_ranks=num_ranks, num_stages=num_stages, steps=360, seed=seed, noise=CALM)
        clean = record(job)
        slow = record(replace(job, faults=(Fault("slow_compute", rank, 100, 0.9),)))
        told = on_device(slow, is_ddp=False, operation="")
        look = looked_at(slow, told, measured(slow, knows_waits=True))
        assert named(look) == {rank}, seed
        told = on_device(clean, is_ddp=False, operation="")
        look = looked_at(clean, told, measured(clean, knows_waits=True))
        assert (look.answer.state, named(look)) == ("healthy", set()), seed


@pytest.mark.parametrize("noise", [CALM, HEAVY])
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (4, 1), (2, 2)])
def test_measured_steps_may_lie_far_apart(num_ranks: int, num_stages: int, noise: Noise) -> None:
    for start in (150, 300):
        fault = Fault("slow_compute", num_ranks - 1, start, 1.0)
        slow = record(Job(
            num_ranks=num_ranks, num_stages=num_stages, steps=start + 210, noise=noise,
            faults=(fault,),
        ))  # fmt: skip
        told = on_device(slow, is_ddp=False, operation="")
        some = measured(slow, knows_waits=True, is_taken=each_second_then_eighth)
        look = looked_at(slow, told, some)
        assert named(look) == {fault.rank}
        assert look.verdict is not None
        assert look.verdict.onset_step is not None
        assert start <= look.verdict.onset_step <= start + 8


@pytest.mark.parametrize("missing", [0, 2])
def test_where_one_rank_does_not_know_its_waits_nobody_is_named(missing: int) -> None:
    slow = record(Job(steps=360, noise=CALM, faults=(Fault("slow_compute", 2, 100, 0.9),)))
    some = [
        without if without[1].rank == missing else known  # type: ignore[union-attr]
        for without, known in zip(measured(slow), measured(slow, knows_waits=True), strict=True)
    ]
    look = looked_at(slow, on_device(slow, is_ddp=False, operation="broadcast"), some)
    assert (look.answer.state, named(look)) == ("unknown", set())


@pytest.mark.parametrize("num_stages", [1, 4])
def test_whatever_is_missing_nobody_is_wrongly_named_nor_called_healthy(num_stages: int) -> None:
    """Drawn spans of some ranks, gone or without their waits, of a faulty and of a clean job."""
    chance = random.Random(num_stages)
    job = Job(num_ranks=4, num_stages=num_stages, steps=330, noise=CALM)
    slow = record(replace(job, faults=(Fault("slow_compute", 3, 140, 0.9),)))
    for recording, truth in ((record(job), set()), (slow, {3})):
        known = measured(recording, knows_waits=True, is_taken=each_second_then_eighth)
        without = measured(recording, is_taken=each_second_then_eighth)
        told = on_device(recording, is_ddp=False, operation="")
        for _ in range(25):
            spans = [
                (chance.random() < 0.5, chance.sample(range(4), chance.randint(1, 4)), begin,
                 begin + chance.choice([5, 40, 150, 400]))
                for begin in (chance.randint(1, 330) for _ in range(chance.randint(1, 3)))
            ]  # fmt: skip
            some: list[Item] = []
            for full, blind in zip(known, without, strict=True):
                one = full[1]
                assert isinstance(one, schema.Metrics)
                is_lost = [
                    lost for lost, ranks, begin, end in spans
                    if one.rank in ranks and begin <= one.step < end
                ]  # fmt: skip
                if not any(is_lost):
                    some.append(blind if is_lost else full)
            look = looked_at(recording, told, some)
            assert named(look) <= truth, spans
            assert not truth or look.answer.state != "healthy", spans


@pytest.mark.parametrize("knows_at_first", [True, False])
def test_steps_whose_waits_are_known_are_not_mixed_with_others(knows_at_first: bool) -> None:
    """A script whose waits are known in a part of its steps alone; nothing ever changes in it."""
    clean = record(Job(steps=400, noise=CALM))
    half = [
        known if (known[1].step < 200) == knows_at_first else without  # type: ignore[union-attr]
        for without, known in zip(measured(clean), measured(clean, knows_waits=True), strict=True)
    ]
    look = looked_at(clean, on_device(clean), half)
    assert named(look) == set()
    assert look.answer.state == ("unknown" if knows_at_first else "healthy")


def test_where_nothing_tells_for_whom_a_device_waits_nobody_is_called_healthy() -> None:
    """All take the same time a step there, a slow one too."""
    recording = record(Job(steps=60, noise=CALM))
    for look in (
        looked_at(recording, on_device(recording)),
        looked_at(recording, on_device(recording, is_ddp=False), measured(recording)),
    ):
        assert look.answer.state == "unknown"
        assert look.answer.text == (
            "No verdict: Ranks 0 to 3: what their devices waited for is not known"
        )
        assert "torch.profiler" in look.answer.deciding[0]


def test_a_change_in_how_long_steps_take_does_not_make_measured_ones_unlike() -> None:
    """Measured steps lie nearer at first: all of them together have more of the time before."""
    slow = record(Job(steps=330, noise=CALM, faults=(Fault("slow_compute", 1, 130, 1.5),)))
    some = measured(slow, knows_waits=True, is_taken=each_second_then_eighth)
    assert named(looked_at(slow, on_device(slow), some)) == {1}


class Kept(msgspec.Struct):
    """A run on a real device, as `data/README.md` tells."""

    program: str
    truth: dict[str, Any] | None
    records: list[schema.AnyRecord]
    chunks: list[schema.Chunk]


def kept_items(file: Path) -> tuple[Kept, list[Item]]:
    kept = msgspec.msgpack.decode(file.read_bytes(), type=Kept)
    items: list[Item] = [(one.time_ns, one) for one in kept.records]
    items += [(chunk.time_hi_ns, (chunk, decode_chunk(chunk.data))) for chunk in kept.chunks]
    return kept, sorted(items, key=lambda item: item[0])


def test_what_a_device_waited_for_is_not_the_ranks_own_work() -> None:
    """FSDP: the wait of the healthy rank is as long as the work of the other, 60 ms a step."""
    kept, items = kept_items(SHORT)
    assert kept.truth is not None
    state = RunState("run")
    apply(state, items)
    verdict = state.look(items[-1][0]).verdict
    assert verdict is not None
    assert verdict.ranks == (kept.truth["rank"],)  # who was waited for, by the devices' few steps
    assert "slower than its peer" in verdict.what
    assert verdict.onset_step is not None
    assert abs(verdict.onset_step - kept.truth["start_step"]) <= 16
    table = state._attempts[0].device_steps.table
    healthy, slow = table.get("own")[[table.row_of[0], table.row_of[1]]]
    begun = int(np.searchsorted(table.steps, kept.truth["start_step"]))
    assert np.all(abs(slow - healthy)[5 : begun - 1] < 25)
    assert np.all((slow - healthy)[begun + 1 :] > 35)
    waited = table.get("blocked")[table.row_of[0], begun + 1 :]
    assert np.median(waited) > 100


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_runs_on_a_real_device_are_judged_as_they_were(file: Path) -> None:
    kept, items = kept_items(file)
    truth = {kept.truth["rank"]} if kept.truth else set()
    state = RunState("run")
    for begin in range(0, len(items), 40):
        part = items[begin : begin + 40]
        apply(state, part)
        look = state.look(part[-1][0])
        assert named(look) <= truth
    if kept.truth is None:
        # states were not kept: all else is known
        assert look.answer.text == "No verdict: hang: no rank has said yet where it is"
    else:
        assert look.verdict is not None
        assert (look.verdict.kind, set(look.verdict.ranks)) == (kept.truth["kind"], truth)
        assert look.verdict.onset_step is not None
        assert abs(look.verdict.onset_step - kept.truth["start_step"]) <= 16
