"""How long DDP waited at the end of a backward pass, from what the ring says of its buckets."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.rank.backward_wait import BackwardWait
from rankscope.wire import schema

MS = 1_000_000
WORDS = {name: at for at, (name, _, _) in enumerate(ring.COLLECTIVE_FIELDS)}


class Model:
    """Stands for a model with a communication hook."""


class Pass:
    """One backward pass after the other, as a source of collectives would write it."""

    def __init__(self, folder: Path) -> None:
        self.ring = ring.RingWriter(
            folder / "ring", ring.COLLECTIVE_SLOT.size, 1024, attempt=0, rank=0, world_size=2,
            local_rank=0,
        )  # fmt: skip
        self.wait = BackwardWait(self.ring)
        self.number = 0

    def issue(
        self, at_ms: float, ended_ms: float = 0.0, flags: int = schema.FLAG_BY_ENGINE,
        num_bytes: int = 0,
    ) -> int:  # fmt: skip
        number, values = self.number, [0] * len(ring.COLLECTIVE_FIELDS)
        self.number += 1
        values[WORDS["number"]] = number + 1
        values[WORDS["arrived_ns"]] = int(at_ms * MS)
        values[WORDS["state"]] = schema.ENDED if ended_ms else schema.RETURNED
        values[WORDS["thread_id"]] = threading.get_native_id()
        values[WORDS["flags"]] = flags
        values[WORDS["input_bytes"]] = num_bytes
        buffer, at = self.ring.buffer, self.ring.offset(number)
        ring.COLLECTIVE_SLOT.pack_into(buffer, at, *values)
        ring.U64.pack_into(buffer, ring.HEAD_AT, number + 1)
        if flags & schema.FLAG_BY_ENGINE:
            ring.U64.pack_into(buffer, ring.ENGINE_NUMBER_AT, number + 1)
            ring.U64.pack_into(buffer, ring.ENGINE_ARRIVED_AT, int(at_ms * MS))
        if ended_ms:
            ring.U64.pack_into(buffer, ring.LATEST_END_AT, int(ended_ms * MS))
        return number

    def ended_after(self, now_ms: float) -> float:
        return self.wait.end(int(now_ms * MS)) / MS

    def blocked_ms(self, number: int) -> float:
        (blocked_ns,) = ring.U64.unpack_from(
            self.ring.buffer,
            self.ring.offset(number) + ring.field_offset(ring.COLLECTIVE_FIELDS, "blocked_ns"),
        )
        return float(blocked_ns) / MS


@pytest.fixture
def one(tmp_path: Path) -> Pass:
    found = Pass(tmp_path)
    found.wait.begin()
    return found


def test_it_lasts_from_the_last_issue_to_the_last_end(one: Pass) -> None:
    one.issue(10, ended_ms=14)
    last = one.issue(20, ended_ms=50)
    assert one.ended_after(55) == 30
    assert one.blocked_ms(last) == 30
    assert one.ended_after(60) == 0  # once


def known(one: Pass, after_ms: float = 5, times: int = 1) -> None:
    """Let so many passes end whose ends are reported in time."""
    for _ in range(times):
        one.issue(1, ended_ms=2)
        one.ended_after(2 + after_ms)
        one.wait.begin()


def test_an_end_that_is_reported_too_late_is_just_before_the_end_of_the_pass(one: Pass) -> None:
    known(one)
    one.issue(10, ended_ms=14)
    last = one.issue(20)
    assert one.ended_after(105) == 80
    assert one.blocked_ms(last) == 80


def test_a_thread_that_finds_no_processor_still_waits(one: Pass) -> None:
    known(one, times=10)
    one.issue(20, ended_ms=50)
    assert one.ended_after(75) == pytest.approx(50, abs=1)


def test_what_follows_is_learnt_anew_where_it_changes(one: Pass) -> None:
    known(one, after_ms=50)
    known(one, after_ms=3, times=20)
    one.issue(20)
    assert one.ended_after(60) == pytest.approx(37, abs=0.1)
    one.wait.begin()
    known(one, after_ms=9, times=200)
    one.issue(20)
    assert one.ended_after(60) == pytest.approx(31, abs=0.1)


def test_the_end_of_an_earlier_bucket_may_come_last(one: Pass) -> None:
    known(one)
    one.issue(10)
    one.issue(20, ended_ms=30)
    assert one.ended_after(55) == 30


def test_of_a_thinned_step_no_end_is_reported(one: Pass) -> None:
    known(one)
    one.ring.buffer[ring.THINNED_AT] = 1
    one.issue(20, ended_ms=21)
    assert one.ended_after(50) == 25


@pytest.mark.parametrize(
    ("earlier", "last", "copied_ms"),
    [
        ((400, 200), 400, 1.5),  # half of what the last one holds, copied in half of its time
        ((400, 400), 8, 2.0),  # what a small last one takes is not the copying of its bytes
        ((400,) * 8, 400, 4.0),  # at most a twentieth of the wait
    ],
)
def test_earlier_buckets_are_copied_while_the_last_is_waited_for(
    one: Pass, earlier: tuple[int, ...], last: int, copied_ms: float
) -> None:
    known(one, after_ms=1)
    for num_bytes in earlier:
        one.issue(10, ended_ms=14, num_bytes=num_bytes)
    one.issue(20, ended_ms=100, num_bytes=last)
    assert one.ended_after(101) == pytest.approx(80 - copied_ms)


def test_on_a_device_no_end_is_reported_and_no_thread_waits(one: Pass) -> None:
    one.issue(20)
    assert one.ended_after(50) == 0


def test_a_pass_without_a_collective_waits_for_nothing(one: Pass) -> None:
    known(one)
    assert one.ended_after(50) == 0
    one.issue(10, flags=schema.FLAG_ASYNC)  # of the script's own: it waits for it where it likes
    assert one.ended_after(50) == 0


def test_ddp_waits_for_what_a_hook_in_python_began(one: Pass) -> None:
    model = Model()
    one.wait.with_hooks.add(model)
    one.issue(10, ended_ms=15, flags=schema.FLAG_ASYNC)
    one.issue(20, ended_ms=48, flags=schema.FLAG_ASYNC)
    assert one.ended_after(50) == 28
    one.wait.begin()
    assert one.ended_after(90) == 0  # those were of the pass before
    del model
    one.issue(100, flags=schema.FLAG_ASYNC)
    assert one.ended_after(150) == 0


def test_what_a_hook_waited_for_itself_is_not_counted_twice(one: Pass) -> None:
    model = Model()
    one.wait.with_hooks.add(model)
    number = one.issue(20, ended_ms=40, flags=schema.FLAG_ASYNC)
    at = one.ring.offset(number) + ring.field_offset(ring.COLLECTIVE_FIELDS, "blocked_ns")
    ring.U64.pack_into(one.ring.buffer, at, 7)
    assert one.ended_after(50) == 0
