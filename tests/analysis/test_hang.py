"""Hangs: the root exactly, in time, with every victim explained; silence while things move."""

from __future__ import annotations

import dataclasses
import random
import time

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.verdict.answers import Look
from tests.analysis.program import Kind, Machine, Op
from tests.analysis.records import grouped
from tests.analysis.simulator import (
    CALM,
    MS,
    START_NS,
    Fault,
    Item,
    Job,
    Recording,
    analyse,
    apply,
    record,
    say,
    wide,
)

REPORT_MS = 1000.0  # states come once a second
FLOOR_MS = POLICY.hang_floor_seconds * 1e3


def hangs(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.kind == "hang"]


def stopped_ms(recording: Recording) -> float:
    return min(rank.stopped_ms for rank in recording.machine.ranks)


def settled(recording: Recording) -> Look:
    """Look when the hang has lasted for as long as it may before it is named."""
    return analyse(recording, recording.last_ms + FLOOR_MS + 1500.0)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_hung_rank_is_named_exactly_and_all_others_are_victims(num_stages: int) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        fault = Fault("hang", chance.randrange(4), chance.randint(3, 80))
        recording = record(Job(num_stages=num_stages, seed=seed, steps=90, faults=(fault,)))
        look = settled(recording)
        (finding,) = hangs(look)
        assert finding.ranks == (fault.rank,), seed
        assert finding.onset_step == fault.start
        assert set(finding.victims) == set(range(4)) - {fault.rank}
        assert look.status == "stuck"
        assert look.verdict is not None
        assert look.verdict.kind == "hang"
        assert finding.cost_throughput_ratio == 1.0


@pytest.mark.parametrize("num_stages", [1, 4])
def test_it_is_named_within_ten_seconds_and_not_before_the_floor(num_stages: int) -> None:
    latest = 0.0
    for seed in range(5):
        job = Job(num_stages=num_stages, seed=seed, steps=60, faults=(Fault("hang", 1, 40),))
        recording = record(job)
        since = stopped_ms(recording)
        state = RunState("run")
        apply(state, recording.items())
        for second in range(12):
            reported_ms = since + second * REPORT_MS
            apply(state, recording.states(reported_ms))
            look = state.look(START_NS + int((reported_ms + REPORT_MS) * MS))  # a second late
            if hangs(look):
                break
            assert reported_ms - since < FLOOR_MS + 2 * REPORT_MS
        took = reported_ms + REPORT_MS - since
        assert took > FLOOR_MS
        latest = max(latest, took)
    say(f"{num_stages} stages: named at most {latest / 1000:.1f} s after the rank went missing")
    assert latest <= 10_000


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("microbatch", range(4))
def test_a_hang_in_the_middle_of_a_pipeline_schedule(stage: int, microbatch: int) -> None:
    fault = Fault("hang", stage, 30, microbatch=microbatch)
    (finding,) = hangs(settled(record(Job(num_stages=4, noise=CALM, steps=40, faults=(fault,)))))
    assert finding.ranks == (stage,)


@pytest.mark.parametrize(
    ("waits_in", "owed", "does"),
    [("send", "recv", "has taken nothing from"), ("recv", "send", "has sent nothing to")],
)
def test_a_rank_that_does_not_come_to_an_exchange(waits_in: Kind, owed: Kind, does: str) -> None:
    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        ops = [Op("compute", "forward", 20.0)]
        if rank == 1 and step == 20:
            return [*ops, Op("stop", "forward")]
        exchange = Op(owed if rank % 2 else waits_in, group="world", peer=rank ^ 1)
        return [*ops, exchange, Op("wait")]

    (finding,) = hangs(settled(recording_of({"world": (0, 1, 2, 3)}, build)))
    assert finding.what == f"Rank 1 on node-0 hangs in step 20: it {does} rank 0"
    assert (finding.ranks, finding.victims) == ((1,), (0,))
    assert f"Rank 0 waits in {waits_in} " in finding.why


def test_nested_groups_name_one_rank_of_thirty_two() -> None:
    for seed in range(12):
        chance = random.Random(seed)
        fault = Fault("hang", chance.randrange(32), 12, microbatch=chance.randrange(-1, 4))
        job = Job(num_ranks=32, num_stages=4, num_hosts=4, seed=seed, steps=15, noise=CALM,
                  faults=(fault,), clock_error_ms=40.0)  # fmt: skip
        look = settled(record(job))
        (finding,) = hangs(look)
        assert finding.ranks == (fault.rank,), (seed, fault)
        assert set(finding.victims) == set(range(32)) - {fault.rank}, (seed, fault)


def test_two_roots_are_both_named() -> None:
    faults = (Fault("hang", 3, 12), Fault("hang", 13, 12))
    job = Job(num_ranks=16, num_stages=2, steps=15, noise=CALM, faults=faults)
    named = {rank for finding in hangs(settled(record(job))) for rank in finding.ranks}
    assert named == {3, 13}


def test_a_chain_of_victims_is_explained_by_its_root() -> None:
    """0 waits for 1 in one group, 1 for 2 in the next, 2 for 3: only 3 has not come."""
    groups = {f"pair-{low}": (low, low + 1) for low in range(3)}

    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        ops = [Op("compute", "forward", 20.0)]
        if rank == 3 and step == 20:
            return [*ops, Op("stop", "forward")]
        for low in (rank, rank - 1):  # first the pair with the rank above
            if 0 <= low < 3:
                ops += [Op("issue", group=f"pair-{low}"), Op("join")]
        return ops

    recording = recording_of(groups, build)
    (finding,) = hangs(settled(recording))
    assert finding.ranks == (3,)
    assert finding.victims == (0, 1, 2)
    assert "behind" in finding.why


def recording_of(groups: dict[str, tuple[int, ...]], build: object) -> Recording:
    """Run a program of its own on four ranks."""
    machine = Machine(4, groups, build, 30)  # type: ignore[arg-type]
    machine.run()

    class Custom(Job):
        def groups(self) -> dict[str, tuple[int, ...]]:
            return groups

    return Recording(Custom(steps=30), machine)


def test_a_deadlock_names_the_circle_and_hedges() -> None:
    groups = {"a": (0, 1), "b": (0, 1), "world": (0, 1, 2, 3)}

    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        ops = [Op("compute", "forward", 20.0)]
        order = ("a", "b") if rank == 0 or step < 20 else ("b", "a")
        if rank < 2:
            for group in order:
                ops += [Op("issue", group=group), Op("join")]
        return [*ops, Op("issue", group="world"), Op("join")]

    (finding,) = hangs(settled(recording_of(groups, build)))
    assert finding.ranks == (0, 1)
    assert "each other" in finding.what
    assert finding.confidence < POLICY_HIGH


POLICY_HIGH = 0.85


def test_a_slow_rank_is_not_hung() -> None:
    """A step of 20 s whose phases advance: slow, and the straggler's business."""

    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        parts = 20 if rank == 2 and step == 15 else 1
        work = [Op("compute", "forward", 1000.0 if parts > 1 else 20.0)] * parts
        return [*work, Op("issue", group="world"), Op("join")]

    recording = recording_of({"world": (0, 1, 2, 3)}, build)
    begin = recording.machine.ranks[2].log[14].started_ms
    for second in range(20):
        assert not hangs(analyse(recording, begin + 1000.0 * second))


def test_a_hang_that_ends_by_itself_recovers() -> None:
    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        work = 9000.0 if rank == 2 and step == 15 else 20.0
        return [Op("compute", "data", work), Op("issue", group="world"), Op("join")]

    recording = recording_of({"world": (0, 1, 2, 3)}, build)
    begin = recording.machine.ranks[2].log[14].started_ms
    state = RunState("run")
    seen = []
    for second in range(14):
        now_ns = START_NS + int((begin + 1000.0 * second) * MS)
        apply(state, [item for item in recording.items() if item[0] <= now_ns])
        apply(state, recording.states(begin + 1000.0 * second))
        look = state.look(now_ns)
        seen.append([(f.ranks, f.state) for f in hangs(look)])
    assert [((2,), "open")] in seen
    assert seen[-1] == [((2,), "recovered")]
    assert look.verdict is None


def test_the_first_step_may_take_long() -> None:
    job = Job(steps=5, faults=(Fault("hang", 1, 1),))
    recording = record(job)
    assert not hangs(analyse(recording, recording.last_ms + 20_000))
    assert hangs(analyse(recording, recording.last_ms + 40_000))


def test_a_checkpoint_may_take_long() -> None:
    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        ops = [Op("compute", "forward", 20.0), Op("issue", group="world"), Op("join")]
        return [Op("compute", "checkpoint", 30_000.0), *ops] if (rank, step) == (0, 15) else ops

    recording = recording_of({"world": (0, 1, 2, 3)}, build)
    begin = recording.machine.ranks[0].log[14].started_ms
    assert not hangs(analyse(recording, begin + 25_000))


def rank_of(item: Item) -> int:
    """Return whose item it is."""
    what = item[1]
    return what[0].rank if isinstance(what, tuple) else what.rank


def test_silence_while_a_member_was_never_heard_of() -> None:
    recording = record(Job(steps=20, faults=(Fault("hang", 1, 10),)))
    at_ms = recording.last_ms + 6000
    state = RunState("run")
    apply(state, [item for item in recording.items() if rank_of(item) != 3])
    apply(state, [item for item in recording.states(at_ms) if rank_of(item) != 3])
    look = state.look(START_NS + int(at_ms * MS))
    assert not hangs(look)
    assert look.answer.state == "unknown"
    assert "3 of 4 ranks" in look.answer.text


def test_a_node_that_says_nothing_while_others_wait_is_the_root() -> None:
    job = Job(num_ranks=4, num_hosts=2, steps=40, noise=CALM)
    recording = record(job)
    at = recording.machine.ranks[0].log[20].started_ms + 1.0
    state = RunState("run")
    apply(state, [item for item in recording.items() if item[0] <= START_NS + at * MS])
    apply(state, recording.states(at))
    state.look(START_NS + int(at * MS))
    frozen = [item for item in recording.states(at) if getattr(item[1], "rank", -1) < 2]
    (frozen_step,) = {getattr(item[1], "step", -1) for item in frozen}
    look = None
    for second in range(1, 16):  # node-1 is gone; the ranks of node-0 wait and report
        later = int((at + 1000 * second) * MS) + START_NS
        for _, what in frozen:
            assert isinstance(what, schema.RankState)
            world = dataclasses_replace(what, later)
            state.apply_record(world)
        look = state.look(later)
    assert look is not None
    (finding,) = hangs(look)
    assert finding.ranks == (2, 3)
    assert "have stopped reporting in step" in finding.what
    assert finding.onset_step == frozen_step  # of those who wait: where they are is not known


def test_a_node_that_says_nothing_is_not_accused_beside_a_rank_that_is_known_to_hang() -> None:
    """The collector of node-0 dies about when rank 2 on node-1 hangs in step 30."""
    recording = record(
        Job(num_ranks=4, num_hosts=2, steps=40, noise=CALM, faults=(Fault("hang", 2, 30),))
    )
    state = RunState("run")
    apply(state, recording.items())
    heard_ms = recording.machine.ranks[0].log[25].started_ms + 1.0
    apply(state, recording.states(heard_ms))
    state.look(START_NS + int(recording.last_ms * MS))
    for second in range(1, 16):
        at_ms = recording.last_ms + 1000 * second
        apply(state, [item for item in recording.states(at_ms) if rank_of(item) >= 2])
        look = state.look(START_NS + int(at_ms * MS))
    (finding,) = hangs(look)
    assert (finding.ranks, finding.victims) == ((2,), (3,))
    assert finding.what.startswith("Rank 2 on node-1 hangs in step 30: it has not entered")
    assert "ranks 0 and 1 although other nodes report: where they are is not known" in finding.why


def dataclasses_replace(state: schema.RankState, now_ns: int) -> schema.RankState:
    """Return the state of a rank that has entered one more collective and waits since."""
    (group,) = state.groups
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    if group.issued == group.ended:
        fields["issued"] = group.issued + 1
    values = {name: getattr(state, name) for name in state.__struct_fields__}
    values |= {"time_ns": now_ns, "groups": [schema.GroupState(**fields)]}
    return schema.RankState(**values)


def test_the_stack_of_the_root_is_evidence() -> None:
    recording = record(Job(steps=20, faults=(Fault("hang", 1, 10),)))
    text = 'File "dataloader.py", line 9 in _next_data\nFile "train.py", line 3 in main'
    taken_ns = START_NS + int((recording.last_ms + 2000) * MS)
    waiting = 'File "distributed_c10d.py", line 2 in all_reduce\nFile "train.py", line 9 in main'
    recording.extra += [
        (taken_ns, schema.Stacks(attempt=0, rank=rank, time_ns=taken_ns,
                                 text=text if rank == 1 else waiting))
        for rank in range(4)
    ]  # fmt: skip
    (finding,) = hangs(settled(recording))
    assert "stuck in its DataLoader" in finding.what
    assert any("3 ranks that wait" in e.text and "all_reduce" in e.text for e in finding.evidence)
    assert any("_next_data" in evidence.text for evidence in finding.evidence)
    assert "data loader" in finding.next


def test_after_the_job_is_stopped_the_hang_is_still_what_happened() -> None:
    recording = record(Job(steps=40, faults=(Fault("hang", 1, 30),)))
    at_ms = recording.last_ms + 8000
    state = RunState("run")
    apply(state, recording.items())
    apply(state, recording.states(at_ms))
    before = state.look(START_NS + int(at_ms * MS))
    ends: list[Item] = []
    for rank in range(4):
        now = recording.clock_ns(rank, at_ms + 50)
        ended = schema.RankEnded(attempt=0, rank=rank, time_ns=now, reason="signal", signal=15)
        ends.append((now, ended))
    apply(state, ends)
    after = state.look(START_NS + int((at_ms + 1000) * MS))
    replayed = RunState("run")
    apply(replayed, [*recording.items(), *recording.states(at_ms), *ends])
    assert replayed.look(START_NS + int((at_ms + 1000) * MS)).verdict == after.verdict
    assert before.verdict is not None
    assert after.verdict is not None
    assert after.verdict.key == before.verdict.key
    assert after.status == "failed"


def test_what_was_seen_at_its_height_stays_while_the_job_is_ended() -> None:
    recording = record(Job(steps=40, faults=(Fault("hang", 1, 30),)))
    at_ms = recording.last_ms + 8000
    state, states = RunState("run"), recording.states(at_ms)
    apply(state, recording.items())
    apply(state, states)
    (before,) = hangs(state.look(START_NS + int(at_ms * MS)))
    assert set(before.victims) == {0, 2, 3}
    later: list[Item] = []
    for _, told in states:  # two of them gave up, and only the third waits still
        assert isinstance(told, schema.RankState)
        groups = (
            [msgspec.structs.replace(group, ended=group.issued) for group in told.groups]
            if told.rank in (0, 2)
            else told.groups
        )
        now_ns = told.time_ns + 500 * 10**6
        later.append((now_ns, msgspec.structs.replace(told, time_ns=now_ns, groups=groups)))
        if told.rank in (0, 2):
            later.append((now_ns, schema.RankEnded(
                attempt=0, rank=told.rank, time_ns=now_ns, reason="signal", signal=15,
            )))  # fmt: skip
    apply(state, later)
    (after,) = hangs(state.look(START_NS + int((at_ms + 600) * MS)))
    assert (after.what, after.why, after.victims) == (before.what, before.why, before.victims)


def test_relabelled_ranks_and_scaled_times_give_the_same_findings() -> None:
    plain = Job(num_ranks=8, steps=30, noise=CALM, faults=(Fault("hang", 2, 20),))
    other = dataclasses.replace(plain, faults=(Fault("hang", 5, 20),))
    slower = dataclasses.replace(plain, step_ms=250.0)
    found = [hangs(settled(record(job)))[0] for job in (plain, other, slower)]
    assert [(f.ranks, f.onset_step) for f in found] == [((2,), 20), ((5,), 20), ((2,), 20)]


def test_a_thousand_ranks_with_one_hung_take_less_than_a_second() -> None:
    state, now = RunState("wide"), START_NS + 10**12
    for rank in range(1024):
        who = {"attempt": 0, "rank": rank}
        members = {"world": list(range(1024)), f"dp-{rank % 8}": list(range(rank % 8, 1024, 8))}
        for name, ranks in members.items():
            state.apply_record(grouped(**who, ranks=ranks, time_ns=1, group=name, backend="nccl"))
        is_root, in_group = rank == 619, rank % 8 == 619 % 8
        ended = now - 6 * 10**9
        state.apply_record(schema.RankState(
            **who, time_ns=now, step=50, phase="backward", phase_since_ns=ended,
            heartbeat_ns=ended,
            groups=[
                schema.GroupState(group=f"dp-{rank % 8}", issued=99 if is_root else 100,
                                  ended=99 if in_group else 100, operation="all_reduce",
                                  issued_ns=ended),
                schema.GroupState(group="world", issued=49 if in_group else 50, ended=49,
                                  operation="all_reduce", issued_ns=ended),
            ],
        ))  # fmt: skip
    apply(state, wide(np.full((1024, 49), 100.0)))
    began = time.process_time()
    look = state.look(now)
    took = time.process_time() - began
    say(f"hang among 1,024 ranks: {1000 * took:.0f} ms")
    assert [f.ranks for f in hangs(look)] == [(619,)]
    assert len(hangs(look)[0].victims) == 1023
    assert took < 1.0
