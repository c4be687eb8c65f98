from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from rankscope.files import ring
from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.ranks.rank import FollowedRank
from rankscope.node.ranks.rings import SETTLE_NS, CollectiveFollower, StepFollower
from rankscope.wire import schema
from tests.agent.collector.fake_rank import FakeRank

GROUPS = {1: "0"}


@pytest.fixture
def fake(tmp_path: Path) -> FakeRank:
    return FakeRank(tmp_path, 0, num_slots=1024)


def follower(fake: FakeRank, offsets: RankOffsets | None = None) -> CollectiveFollower:
    reader = ring.RingReader(fake.ring.path, ring.COLLECTIVE_FIELDS)
    return CollectiveFollower(reader, offsets or RankOffsets())


def later() -> int:
    return time.monotonic_ns() + SETTLE_NS + 1


def read(
    of: CollectiveFollower, *, now: int | None = None, gone: bool = False
) -> tuple[list[int], int]:
    slots, lost, _ = of.read(now or later(), GROUPS, gone=gone)
    return slots["sequence"].tolist(), lost


def test_a_slot_is_taken_when_its_end_has_settled(fake: FakeRank) -> None:
    of = follower(fake)
    first, second = fake.issue(), fake.issue()
    assert read(of) == ([], 0)
    fake.end(second)
    assert read(of, now=time.monotonic_ns()) == ([], 0)  # blocked_ns may still come
    assert read(of) == ([2], 0)
    fake.end(first)
    assert read(of) == ([1], 0)
    assert read(of) == ([], 0)


def test_what_is_left_is_taken_as_it_is_when_the_rank_is_gone(fake: FakeRank) -> None:
    of = follower(fake)
    fake.issue()
    at = fake.ring.offset(fake.issue())
    ring.U64.pack_into(fake.ring.buffer, at, 0)  # killed in mid-write
    slots, lost, more = of.read(time.monotonic_ns(), None, gone=True)
    assert (slots["state"].tolist(), lost, more) == ([schema.ISSUED], 1, False)


def test_going_on_from_offsets_takes_each_slot_once(fake: FakeRank) -> None:
    of, seen = follower(fake), []
    open_numbers = []
    for turn in range(20):
        for _ in range(30):
            number = fake.issue()
            if number % 7:
                fake.end(number)
            else:
                open_numbers.append(number)
        if turn % 3 == 0 and open_numbers:
            fake.end(open_numbers.pop(0))
        seen += read(of)[0]
        offsets = RankOffsets()
        of.save(offsets)
        of = follower(fake, offsets)
    seen += read(of, gone=True)[0]
    assert sorted(seen) == list(range(1, 601))


def test_overwritten_slots_are_counted(fake: FakeRank) -> None:
    of = follower(fake)
    open_one = fake.issue()
    assert read(of) == ([], 0)
    for _ in range(3000):
        fake.end(fake.issue())
    sequences, lost = read(of)
    assert sequences == list(range(3001 - 1023, 3002))
    assert lost == 3001 - 1024
    assert open_one == 0


def test_an_open_slot_is_taken_before_the_ring_comes_round(fake: FakeRank) -> None:
    of = follower(fake)
    fake.issue()
    for _ in range(900):
        fake.end(fake.issue())
    slots, lost, _ = of.read(later(), GROUPS, gone=False)
    assert slots["state"].tolist()[:2] == [schema.ISSUED, schema.ENDED]
    assert lost == 0


def test_a_group_whose_backend_tells_no_end(fake: FakeRank) -> None:
    of = follower(fake)
    for _ in range(300):
        fake.issue(state=schema.RETURNED)
    assert read(of) == ([], 0)
    assert len(read(of, now=time.monotonic_ns() + 3 * 10**9)[0]) == 300


def test_a_slot_waits_for_the_name_of_its_group(fake: FakeRank) -> None:
    of = follower(fake)
    fake.end(fake.issue(group_id=9))
    assert read(of) == ([], 0)
    slots, _, _ = of.read(later(), {9: "late"}, gone=False)
    assert len(slots) == 1


def test_a_head_that_a_late_thread_set_back(fake: FakeRank) -> None:
    of = follower(fake)
    for _ in range(5):
        fake.end(fake.issue())
    ring.U64.pack_into(fake.ring.buffer, ring.HEAD_AT, 3)
    assert read(of)[0] == [1, 2, 3]
    assert read(of, gone=True)[0] == [4, 5]


@pytest.mark.parametrize("head", [5000, 1 << 40, (1 << 64) - 1])
def test_a_head_that_the_slots_cannot_have(fake: FakeRank, head: int) -> None:
    of = follower(fake)
    fake.end(fake.issue())
    ring.U64.pack_into(fake.ring.buffer, ring.HEAD_AT, head)
    with pytest.raises(ring.RingDamaged):
        read(of)


def test_many_open_slots_are_looked_at_less_often(tmp_path: Path) -> None:
    fake = FakeRank(tmp_path, 0, num_slots=16384)
    of = follower(fake)
    numbers = [fake.issue() for _ in range(2500)]
    read(of)
    for number in numbers:
        fake.end(number)
    seen = [len(read(of)[0]) for _ in range(5)]
    assert sum(seen) == 2500
    assert seen.count(0) == 4


def test_standing_of_the_groups(fake: FakeRank) -> None:
    of = follower(fake)
    fake.end(fake.issue(sequence=1))
    fake.issue(sequence=2, input_bytes=77, output_bytes=0)
    fake.end(fake.issue(sequence=5, group_id=2, operation=schema.OPERATIONS.index("broadcast")))
    recv = schema.OPERATIONS.index("recv")
    fake.issue(sequence=3, flags=schema.FLAG_P2P, operation=recv, peer_rank=3)
    read(of)
    states = of.tracker.states({1: "0", 2: "tp"}, {1: "train.py:1 f"}, lambda ns: ns)
    by_name = {state.group: state for state in states}
    world = by_name["0"]
    assert (world.issued, world.ended, world.size_bytes) == (2, 1, 77)
    assert (world.p2p_operation, world.p2p_peer) == ("recv", 3)
    assert world.p2p_issued_ns > 0
    assert (by_name["tp"].issued, by_name["tp"].ended) == (5, 5)
    assert by_name["tp"].operation == "broadcast"
    assert of.tracker.oldest_inside_ns == world.issued_ns
    again = follower(fake, RankOffsets(read_to=4, open_ranges=[1, 1, 3, 1]))  # after a restart
    read(again)
    assert again.tracker.states({1: "0", 2: "tp"}, {1: "train.py:1 f"}, lambda ns: ns) == states


def test_a_forgotten_send_is_no_hang(fake: FakeRank) -> None:
    of = follower(fake)
    send, recv = (schema.OPERATIONS.index(name) for name in ("send", "recv"))
    fake.issue(operation=send, flags=schema.FLAG_P2P, state=schema.RETURNED, peer_rank=1)
    read(of)
    assert of.tracker.oldest_open_ns == 0
    fake.issue(operation=recv, flags=schema.FLAG_P2P, state=schema.RETURNED, peer_rank=2)
    read(of)
    assert of.tracker.oldest_open_ns > 0
    (state,) = of.tracker.states(GROUPS, {}, lambda ns: ns)
    assert (state.p2p_operation, state.p2p_peer) == ("recv", 2)


def test_steps(fake: FakeRank) -> None:
    of = StepFollower(ring.RingReader(fake.steps.path, ring.STEP_FIELDS), RankOffsets())
    for _ in range(1500):
        fake.step()
    slots, lost, more = of.read()
    assert slots["step"].tolist() == list(range(1500 - 1024 + 1, 1501))
    assert (lost, more) == (1500 - 1024, False)
    offsets = RankOffsets()
    of.save(offsets)
    assert offsets.steps_to == 1500
    assert np.all(slots["ended_ns"] > slots["started_ns"])


@pytest.mark.parametrize("head", [1024 + 11, 1 << 40, (1 << 64) - 1])
def test_a_head_of_steps_that_the_slots_cannot_have(fake: FakeRank, head: int) -> None:
    of = StepFollower(ring.RingReader(fake.steps.path, ring.STEP_FIELDS), RankOffsets())
    for _ in range(10):
        fake.step()
    assert len(of.read()[0]) == 10
    ring.U64.pack_into(fake.steps.buffer, ring.HEAD_AT, head)
    with pytest.raises(ring.RingDamaged):
        of.read()


@pytest.mark.parametrize("size", [0, 100, ring.HEADER_BYTES, ring.HEADER_BYTES + 5000])
@pytest.mark.parametrize("name", ["ring", "steps"])
def test_a_ring_that_is_cut_short_while_it_is_mapped_is_damaged(
    tmp_path: Path, name: str, size: int
) -> None:
    """Its pages are gone: to read them would end the process with SIGBUS."""
    fake = FakeRank(tmp_path, 0, num_slots=1024)
    fake.end(fake.issue())
    fake.step()
    events: list[tuple[str, dict[str, str]]] = []
    ledger = Ledger()
    key = str(fake.directory.relative_to(tmp_path))
    rank = FollowedRank(
        tmp_path, key, RankOffsets(), ledger, "h", lambda *event: events.append(event)
    )
    rank.collect(lambda raw: None)
    cut = getattr(fake, name)
    os.truncate(cut.path, size)
    for gone in (False, False, True):
        rank.collect(lambda raw: None, gone=gone)
        rank.state(None, alive=not gone)
        rank.look()
        rank.end_step("clean")
        rank.offsets()
        rank.take()
    ((said, fields),) = events
    assert said == "ring damaged"
    assert f"cut short from {cut.slot_bytes * 1024 + 4096} to {size} bytes" in fields["reason"]
    (loss,) = ledger.take_records()
    assert (loss.source, loss.reason) == (cut.path.stem, "ring damaged")


BY_ENGINE = schema.FLAG_THINNED | schema.FLAG_BY_ENGINE


def backward(fake: FakeRank, *, engine_number: int) -> None:
    """Say in the header that a backward pass is under way whose last call was this slot."""
    ring.U64.pack_into(fake.ring.buffer, ring.PHASE_SINCE_AT, time.monotonic_ns())
    fake.ring.buffer[ring.PHASE_AT] = schema.PHASES.index("backward")
    ring.U64.pack_into(fake.ring.buffer, ring.STEP_AT, 1)
    ring.U64.pack_into(fake.ring.buffer, ring.ENGINE_NUMBER_AT, engine_number + 1)


def test_what_ddp_called_in_a_thinned_step_is_open_until_its_backward_pass_is_over(
    fake: FakeRank,
) -> None:
    of = follower(fake)
    before = fake.issue(state=schema.RETURNED, flags=BY_ENGINE)
    backward(fake, engine_number=before + 2)
    for _ in range(2):
        fake.issue(state=schema.RETURNED, flags=BY_ENGINE)
    assert read(of) == ([], 0)
    (standing,) = of.tracker.states(GROUPS, {}, lambda time_ns: time_ns)
    assert (standing.issued, standing.ended, standing.open_sequence) == (3, 1, 2)
    assert of.tracker.oldest_open_ns > 0
    ring.U64.pack_into(fake.ring.buffer, ring.ENGINE_NUMBER_AT, 0)
    assert read(of) == ([], 0)
    (standing,) = of.tracker.states(GROUPS, {}, lambda time_ns: time_ns)
    assert (standing.issued, standing.ended, standing.open_sequence) == (3, 3, 0)
    assert of.tracker.oldest_open_ns == 0


def test_calls_of_thinned_steps_tell_where_a_rank_is_and_stay_on_the_node(fake: FakeRank) -> None:
    of = follower(fake)
    whole, thinned = fake.issue(), fake.issue(flags=schema.FLAG_THINNED)
    (standing,) = (read(of), of.tracker.states(GROUPS, {}, lambda time_ns: time_ns))[1]
    assert (standing.issued, standing.open_sequence, standing.operation) == (2, 1, "all_reduce")
    fake.end(whole)
    assert read(of) == ([1], 0)
    (standing,) = of.tracker.states(GROUPS, {}, lambda time_ns: time_ns)
    assert (standing.open_sequence, standing.open_operation) == (2, "all_reduce")
    fake.end(thinned)
    assert read(of) == ([], 0)
    (standing,) = of.tracker.states(GROUPS, {}, lambda time_ns: time_ns)
    assert (standing.issued, standing.ended) == (2, 2)


@pytest.mark.parametrize(
    ("end", "last_done"),
    [(ring.RUNNING, 1), (ring.EXCEPTION, 1), (ring.CLEAN, 1), (ring.CLEAN, 2)],
)
def test_of_a_thinned_step_only_what_a_rank_ended_in_is_sent(
    fake: FakeRank, end: int, last_done: int
) -> None:
    """A wrong call may end all ranks at once: what each of them called is known from its ring.

    One that took a SIGTERM because another aborted says that it ended well, inside a step.
    """
    of = follower(fake)
    seen = {"issued_by": 1, "state": schema.RETURNED, "flags": BY_ENGINE}
    fake.issue(**seen)
    ring.U64.pack_into(fake.ring.buffer, ring.STEP_AT, 2)
    for _ in range(2):
        fake.issue(step=2, **seen)
    fake.issue(step=2, **seen | {"issued_by": 0})  # what was called is not known
    assert read(of) == ([], 0)  # its backward pass broke off, the process still lives
    fake.ring.buffer[ring.ENDED_AT] = end
    slots, _, _ = of.read(later(), GROUPS, gone=True, last_done=last_done)
    is_dead = last_done < 2
    assert slots["sequence"].tolist() == ([2, 3] if is_dead else [])
    assert set(slots["flags"].tolist()) == ({schema.FLAG_BY_ENGINE} if is_dead else set())
    assert set(slots["state"].tolist()) == ({schema.RETURNED} if is_dead else set())
    assert read(of, gone=True) == ([], 0)  # once
