"""Desync: random programs with one random edit; the edit is named, and clean programs are not."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.alignment import Edit, align, foretell
from rankscope_server.observe.calls import KEPT, MAX_OPEN, CallTable
from rankscope_server.observe.collectives import Collectives
from rankscope_server.verdict.answers import Look
from tests.analysis.records import START_NS, grouped, registered
from tests.analysis.simulator import say

MS = 1_000_000
VERBS = ("skipped", "inserted", "swapped", "shape", "dtype", "operation", "reduce operation")


@dataclass(frozen=True)
class Made:
    """One call of a made program."""

    operation: str = "all_reduce"
    dtype: str = "float32"
    elements: int = 1024
    reduce_op: str = "sum"
    site: str = "train.py:10 step"
    step: int = 1

    @property
    def size_bytes(self) -> int:
        return self.elements * {"float32": 4, "int64": 8, "bfloat16": 2, "int32": 4}[self.dtype]


def program(chance: random.Random, steps: int, same_shape: bool = False) -> list[Made]:
    """Return the calls of a training loop: in each step the same ones in the same order."""
    length = chance.randint(3, 9)
    body = []
    for place in range(length):
        operation = chance.choice(["all_reduce", "broadcast", "reduce_scatter_tensor"][: place + 1])
        body.append(
            Made(
                operation="all_reduce" if same_shape else operation,
                dtype="float32" if same_shape else chance.choice(["float32", "bfloat16", "int64"]),
                elements=4096 if same_shape else chance.choice([1, 10, 1024, 4096]),
                reduce_op="sum" if same_shape or operation != "broadcast" else "",
                site=f"train.py:{10 + place} step",
            )
        )
    return [replace(call, step=step) for step in range(1, steps + 1) for call in body]


def edited(calls: Sequence[Made], verb: str, place: int) -> list[Made]:
    """Return the calls of the rank that is wrong."""
    found, call = list(calls), calls[place]
    if verb == "skipped":
        del found[place]
    elif verb == "inserted":
        found.insert(place, Made("all_reduce", "float32", 7, "max", "extra.py:1 log", call.step))
    elif verb == "swapped":
        found[place], found[place + 1] = found[place + 1], found[place]
    elif verb == "shape":
        found[place] = replace(call, elements=call.elements + 2)
    elif verb == "dtype":
        other = "int32" if call.dtype != "int32" else "float32"
        found[place] = replace(call, dtype=other)
    elif verb == "operation":
        other = "all_gather_into_tensor" if call.operation != "all_gather_into_tensor" else "reduce"
        found[place] = replace(call, operation=other)
    else:
        found[place] = replace(call, reduce_op="max")
    return found


def chunk(
    rank: int, calls: Sequence[Made], first: int, group: str
) -> tuple[schema.Chunk, dict[str, Column]]:
    """Return calls as the chunk of a rank."""
    count = len(calls)
    columns: dict[str, Column] = {
        name: np.zeros(count, np.int64) for name in schema.COLLECTIVE_COLUMNS
    }
    numbers = np.arange(first, first + count)
    columns |= {
        "arrived_ns": START_NS + numbers * 50 * MS, "duration_ns": np.full(count, MS),
        "sequence": numbers, "step": np.array([call.step for call in calls]),
        "size_bytes": np.array([call.size_bytes for call in calls]),
        "peer_rank": np.full(count, -1), "state": np.full(count, schema.ENDED),
        "group": [group] * count, "operation": [call.operation for call in calls],
        "dtype": [call.dtype for call in calls], "reduce_op": [call.reduce_op for call in calls],
        "call_site": [call.site for call in calls], "issued_by": [""] * count,
        "ended_by": [""] * count,
    }  # fmt: skip
    times = columns["arrived_ns"]
    assert not isinstance(times, list)
    data = encode_chunk(columns)
    return schema.Chunk(
        kind="collectives", attempt=0, rank=rank, host="", count=count, data=data,
        time_lo_ns=int(times.min()), time_hi_ns=int(times.max()),
    ), columns  # fmt: skip


def look_at(
    by_rank: dict[int, list[Made]], chance: random.Random, group: str = "dp-0", lost: float = 0.0,
    then: Sequence[schema.AnyRecord] = (),
) -> Look:  # fmt: skip
    """Give an analysis the calls in small chunks, shuffled and some doubled, and look."""
    state = RunState("made")
    members = sorted(by_rank)
    for rank in members:
        who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
        state.apply_record(registered(**who, world_size=len(members), backend="gloo"))
        state.apply_record(grouped(**who, ranks=members, group=group))
    parts = []
    for rank, calls in by_rank.items():
        begin = 0
        while begin < len(calls):
            size = chance.randint(1, 40)
            parts.append(chunk(rank, calls[begin : begin + size], begin + 1, group))
            begin += size
    parts = [part for part in parts if chance.random() >= lost]
    parts += [part for part in parts if chance.random() < 0.1]
    chance.shuffle(parts)
    for part in parts:
        state.apply_chunk(*part)
    end_ns = START_NS + 50 * MS * max(map(len, by_rank.values())) + 20_000 * MS
    for rank in members:
        group_state = schema.GroupState(group=group, issued=len(by_rank[rank]), ended=0)
        state.apply_record(schema.RankState(
            attempt=0, rank=rank, time_ns=end_ns, step=by_rank[rank][-1].step, phase="other",
            phase_since_ns=end_ns, heartbeat_ns=end_ns, groups=[group_state],
        ))  # fmt: skip
    for record in then:
        state.apply_record(record)
    return state.look(end_ns)


def desyncs(look: Look) -> list[Finding]:
    assert next(d.state for d in look.detectors if d.name == "desync") == "ran"
    return [finding for finding in look.findings if finding.kind == "desync"]


def is_named(finding: Finding, verb: str, number: int) -> bool:
    words = {"shape": "wrong shape", "dtype": "wrong dtype", "operation": "in place of",
             "reduce operation": "wrong reduce operation"}.get(verb, verb)  # fmt: skip
    return words in finding.what and f"#{number:,}" in finding.what


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_random_edit_of_a_random_program_is_named(verb: str, num_ranks: int) -> None:
    right_rank = right_verb = 0
    rounds = 25
    for seed in range(rounds):
        chance = random.Random(f"{verb} {num_ranks} {seed}")
        calls = program(chance, chance.randint(5, 30))
        while True:  # an edit that changes something
            place = chance.randrange(2 * len(calls) // 5, len(calls) - 2)
            wrong = edited(calls, verb, place)
            if verb == "reduce operation" and not calls[place].reduce_op:
                continue
            if wrong != calls:
                break
        culprit = chance.randrange(num_ranks)
        stop = chance.choice([place + 1, place + 3, len(calls)])  # it may hang at once, or go on
        if verb == "swapped" or replace(calls[place + 1], site=calls[place].site) == calls[place]:
            stop = len(calls)  # one call from another line alone proves nothing
        by_rank = {rank: calls[:stop] for rank in range(num_ranks)}
        by_rank[culprit] = wrong[:stop]
        found = desyncs(look_at(by_rank, chance))
        assert len(found) == 1, (seed, found)
        assert found[0].ranks == (culprit,), (seed, found[0].what)
        assert found[0].severity == "critical"
        right_rank += 1
        right_verb += is_named(found[0], verb, place + 1)
    say(f"desync {verb} among {num_ranks}: rank {right_rank}, verb {right_verb} of {rounds}")
    assert right_verb >= 0.95 * rounds


@pytest.mark.parametrize("verb", ["skipped", "swapped"])
def test_calls_of_one_shape_are_told_apart_by_their_place_in_the_code(verb: str) -> None:
    for seed in range(25):
        chance = random.Random(seed)
        calls = program(chance, 30, same_shape=True)
        place = chance.randrange(len(calls) // 3, len(calls) // 2)
        num_ranks, culprit = chance.choice([3, 4, 8]), chance.randrange(3)
        by_rank = {rank: list(calls) for rank in range(num_ranks)}
        by_rank[culprit] = edited(calls, verb, place)
        (finding,) = desyncs(look_at(by_rank, chance))
        assert finding.ranks == (culprit,), (seed, finding.what)
        assert is_named(finding, verb, place + 1), (seed, finding.what)
        assert "without an error" in finding.why


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_clean_programs_are_silent(num_ranks: int) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        calls = program(chance, 25, same_shape=bool(seed % 2))
        assert not desyncs(look_at({rank: calls for rank in range(num_ranks)}, chance))


@pytest.mark.parametrize("same_shape", [False, True])
def test_ranks_with_lines_of_their_own_are_silent(same_shape: bool) -> None:
    """Rank 0, or a stage, runs the same calls from other lines: since the first step, or later."""
    for seed in range(20):
        chance = random.Random(seed)
        calls = program(chance, 25, same_shape)
        other = [replace(call, site=call.site.replace("train", "rank0")) for call in calls]
        late = [*calls[: len(calls) // 2], *other[len(calls) // 2 :]]
        one_line = [
            replace(call, site="join.py:5 main") for call in calls
        ]  # join() on uneven inputs
        joined = [*calls[: len(calls) // 2], *one_line[len(calls) // 2 :]]
        by_rank = {0: other, 1: calls, 2: calls, 3: late, 4: joined, 5: calls}
        assert not desyncs(look_at(by_rank, chance)), seed


def test_a_swap_on_a_rank_with_lines_of_its_own_is_found() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        calls = program(chance, 40, same_shape=True)
        place = len(calls) - 20
        other = [replace(call, site=call.site.replace("train", "rank0")) for call in calls]
        third = [replace(call, site=call.site.replace("train", "rank4")) for call in calls]
        by_rank = {0: edited(other, "swapped", place), 1: calls, 2: calls, 3: calls, 4: third}
        found = desyncs(look_at(by_rank, random.Random(seed)))
        assert [finding.ranks for finding in found] == [(0,)], seed
        assert is_named(found[0], "swapped", place + 1)


def test_ragged_sizes_are_no_difference_and_splits_must_add_up() -> None:
    ragged = [
        {r: Made("all_to_all_single", elements=100 + 7 * ((r + place) % 5)) for r in range(4)}
        for place in range(50)
    ]  # fmt: skip
    by_rank = {rank: [row[rank] for row in ragged] for rank in range(4)}
    assert not desyncs(look_at(by_rank, random.Random(0)))
    gathered = {
        rank: [Made("all_gather", elements=100 + rank) for _ in range(50)] for rank in range(4)
    }
    assert not desyncs(look_at(gathered, random.Random(0)))
    state = RunState("splits")
    for rank in range(2):
        who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
        state.apply_record(registered(**who, world_size=2, host="h", pid=1))
        state.apply_record(grouped(**who, ranks=[0, 1], group="ep"))
        part, columns = chunk(rank, [Made("all_to_all_single")], 1, "ep")
        columns |= {"input_bytes": np.array([100]), "output_bytes": np.array([100 + 20 * rank])}
        state.apply_chunk(part, columns)
    (finding,) = desyncs(state.look(START_NS + 10**10))
    assert "add up" in finding.what
    assert finding.ranks == ()


def test_two_ranks_that_differ_from_the_first_call_on_are_both_reported() -> None:
    by_rank = {0: [Made(elements=10)], 1: [Made(elements=12)]}
    (finding,) = desyncs(look_at(by_rank, random.Random(0)))
    assert finding.ranks == (0, 1)
    assert finding.confidence < 0.5


def test_what_has_not_come_yet_accuses_nobody() -> None:
    """Two of eight ranks are heard: the one that is right must not look like the odd one out."""
    calls = program(random.Random(0), 20)
    wrong = edited(calls, "shape", 30)
    state = RunState("early")
    for rank in range(8):
        who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
        state.apply_record(grouped(**who, ranks=range(8), group="dp-0"))
        now = START_NS + 50 * MS * 40
        state.apply_record(schema.RankState(
            attempt=0, rank=rank, time_ns=now, step=5, phase="other", phase_since_ns=now,
            heartbeat_ns=now, groups=[schema.GroupState(group="dp-0", issued=40, ended=39)],
        ))  # fmt: skip
    for rank, what in ((3, wrong), (4, wrong), (5, calls)):
        state.apply_chunk(*chunk(rank, what[:40], 1, "dp-0"))
    assert not desyncs(state.look(START_NS + 50 * MS * 41))
    for rank in (0, 1, 2, 6, 7):
        state.apply_chunk(*chunk(rank, calls[:40], 1, "dp-0"))
    (finding,) = desyncs(state.look(START_NS + 50 * MS * 42))
    assert finding.ranks == (3, 4)


def test_lost_chunks_make_no_difference_of_their_own() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        calls = program(chance, 60)
        assert not desyncs(look_at({rank: calls for rank in range(8)}, chance, lost=0.05)), seed


def test_the_alignment_takes_the_fewest_edits_and_foretells_a_loop() -> None:
    def never(one: int, other: int) -> bool:
        return False

    assert align([1, 2, 3, 4], [1, 2, 3, 4], never) == []
    assert align([1, 2, 3, 4], [1, 3, 2, 4], never) == [Edit("swapped", 1, 1)]
    assert align([1, 2, 3, 4], [1, 3, 4], never) == [Edit("skipped", 1, 1)]
    assert align([1, 2, 3, 4], [1, 9, 2, 3, 4], never) == [Edit("inserted", 1, 1)]
    assert align([1, 2, 3], [1, 9, 3], never) == [Edit("replaced", 1, 1)]
    assert foretell([1, 2, 3, 1, 2], 4) == [3, 1, 2, 3]
    assert foretell([1, 2, 3], 2) == []


def test_a_second_program_of_the_same_ranks_counts_from_one_again() -> None:
    first, second = program(random.Random(1), 20), program(random.Random(2), 20)
    state = RunState("twice")

    def register(rank: int, pid: int, time_ns: int) -> None:
        state.apply_record(registered(rank, 4, time_ns=time_ns, host="h", pid=pid, backend="gloo"))

    for rank in range(4):
        register(rank, 10 + rank, START_NS)
        who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
        state.apply_record(grouped(**who, ranks=[0, 1, 2, 3], backend=""))
    old = [chunk(rank, first[:40], 1, "0") for rank in range(4)]
    again_ns = START_NS + 10_000 * MS
    for part in old[:3]:
        state.apply_chunk(*part)
    for rank in range(4):
        register(rank, 20 + rank, again_ns)
    state.apply_chunk(*old[3])  # late: of the program before
    for rank in range(4):
        part, columns = chunk(rank, second[:40], 1, "0")
        later = columns | {"arrived_ns": np.asarray(columns["arrived_ns"]) + 11_000 * MS}
        state.apply_chunk(msgspec.structs.replace(part, data=encode_chunk(later)), later)
    assert not desyncs(state.look(again_ns + 60_000 * MS))


def test_a_rank_that_says_nothing_fills_no_memory() -> None:
    table = CallTable()
    table.define("world", 17)
    calls = [Made(site=f"train.py:{place % 7} step") for place in range(4000)]
    for begin in range(0, 40_000, 4000):
        for rank in range(16):
            table.add(Collectives.of(rank, chunk(rank, calls, begin + 1, "world")[1]))
        for site in table.tracks["world"].sites.values():
            assert len(site) == 7
    track = table.tracks["world"]
    assert track.num_open <= MAX_OPEN
    assert track.given_up > 0
    assert not track.odd


def state_of(rank: int, number: int, operation: str = "all_reduce") -> schema.RankState:
    """Return the state of a rank that has just entered a collective of group "world"."""
    now = START_NS + number * 50 * MS
    group = schema.GroupState(
        group="world", issued=number, ended=number - 1, operation=operation, dtype="float32",
        reduce_op="sum", size_bytes=4096, issued_ns=now,
    )  # fmt: skip
    return schema.RankState(
        attempt=0, rank=rank, time_ns=now, step=number // 8, phase="backward", phase_since_ns=now,
        heartbeat_ns=now, thinning=8, groups=[group],
    )  # fmt: skip


def test_states_of_thinned_steps_fill_no_memory_and_still_show_who_differs() -> None:
    """100,000 states, and one step in 128 whole: numbers of the others come in no chunk."""
    num_ranks, per_round, rounds = 8, 128 * 8, 782
    chance, table = random.Random(5), CallTable()
    table.define("world", num_ranks)
    whole = [Made(site="") for _ in range(8)]
    most = 0
    for begin in range(0, rounds * per_round, per_round):
        for number in sorted(chance.sample(range(begin + 1, begin + per_round - 8), 16)):
            for rank in range(num_ranks):  # they are not asked in the same moment
                table.add_state(state_of(rank, max(begin + 1, number - chance.randrange(8))))
        for rank in range(num_ranks):
            table.add(Collectives.of(rank, chunk(rank, whole, begin + per_round - 7, "world")[1]))
        most = max(most, table.tracks["world"].num_open)
    track = table.tracks["world"]
    assert table.num_taken > 100_000
    assert most < 4 * KEPT
    assert track.newest == track.last_agreed == rounds * per_round
    assert not track.odd
    number = track.newest + 100
    for rank in range(num_ranks):
        table.add_state(state_of(rank, number, "broadcast" if rank == 3 else "all_reduce"))
    track = table.tracks["world"]
    assert track.odd == {number}
    called = track.row(number)
    assert [rank for rank in called if called[rank] != called[0]] == [3]


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
@pytest.mark.parametrize("dying", [(1, 2, 3), (1,), (0, 3)])
def test_of_ranks_that_abort_the_one_with_the_wrong_call_is_to_blame(
    dying: Sequence[int], number: signal.Signals
) -> None:
    """gloo ends the rank that sent a wrong length, and those that got it, in the same moment."""
    chance = random.Random(11)
    calls = program(chance, 20)
    by_rank = {rank: calls for rank in range(4)} | {2: edited(calls, "shape", 40)}
    ends: list[schema.AnyRecord] = [
        schema.RankEnded(
            attempt=0, rank=rank, time_ns=START_NS + (40 * 50 + 100 + rank) * MS, last_step=9,
            reason="signal", signal=number,
        )
        for rank in dying
    ]  # fmt: skip
    look = look_at(by_rank, chance, then=ends)
    found = {finding.kind: finding for finding in look.findings}
    assert found["desync"].ranks == (2,)
    assert found["crash"].ranks == ((2,) if 2 in dying else ())
    assert found["crash"].explained_by == found["desync"].key
