"""Follows the rings of one rank: takes each slot once, when it no longer changes."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from rankscope.files import ring
from rankscope.node.flight.ends import Ends
from rankscope.node.offsets import RankOffsets, from_ranges, to_ranges
from rankscope.node.ranks.states import GroupTracker
from rankscope.wire import schema

SETTLE_NS = 500_000_000  # `blocked_ns` may be written so long after the end
ENDLESS_NS = 2_000_000_000  # age of an operation that a backend never ends
HELD_NS = 6_000_000_000  # the same, where the Flight Recorder may still report an end
MAX_NEW = 8192  # slots per turn and ring
_KEEP_RATIO = 0.75  # an open slot is taken as it is before the ring comes round to it
_MANY_OPEN = 2000  # more than that are looked at every fifth turn only
_SLOW_TURNS = 5
_MAX_HEAD = 1 << 48
_BY_NONE = schema.ISSUED_BY.index("")


class CollectiveFollower:
    """The ring of collectives of one process.

    `read` may raise ring.RingDamaged: the head is not one that the slots could have.
    """

    def __init__(
        self, reader: ring.RingReader, offsets: RankOffsets, ends: Ends | None = None
    ) -> None:
        self.reader = reader
        self.tracker = GroupTracker()
        self._ends = ends or Ends()
        self._read_to = offsets.read_to
        self._open = from_ranges(offsets.open_ranges, reader.num_slots)
        self._turn = 0
        self._look_back()

    def read(
        self, now_ns: int, known_groups: Container[int] | None, *, gone: bool, last_done: int = 0
    ) -> tuple[Any, int, bool]:
        """Return (slots that are final, how many were overwritten unread, whether there is more).

        Those of thinned steps are followed for the standing of the groups and not returned, but for
        what a rank was in when it ended. A slot whose group is not in `known_groups` waits for the
        journal; None: wait no longer. `gone`: the process has ended, everything is final, and
        `last_done` is the last step that it brought to its end.
        """
        head = self._head(gone)
        lost = max(0, head - self.reader.num_slots - self._read_to)
        self._read_to += lost
        upto = min(head, self._read_to + MAX_NEW)
        self._turn += 1
        slow = len(self._open) > _MANY_OPEN and not gone and self._turn % _SLOW_TURNS
        again = self._open[:0] if slow else self._open
        numbers = np.concatenate((again, np.arange(self._read_to, upto, dtype=np.int64)))
        slots, state = self.reader.read(numbers)
        whole = state == 1
        self._ends.apply(slots, numbers)
        self._close_thinned(slots)
        self.tracker.update(slots[whole])
        final = whole & self._final(slots, numbers, now_ns, head, gone)
        if known_groups is not None and final.any():
            final &= _have_names(slots["group_id"], known_groups)
        waits = ~final & (state != -1) & (whole | (not gone))
        self._read_to = upto
        if slow:
            self._open = np.concatenate((self._open, numbers[waits]))
        else:
            self._open = numbers[waits]
            self.tracker.set_open(slots[waits & whole])
        lost += int((state == -1).sum()) + (int((state == 0).sum()) if gone else 0)
        taken = slots[final]
        self._ends.finish(taken, numbers[final])
        return self._to_send(taken, last_done, gone=gone), lost, upto < head

    def _to_send(self, slots: Any, last_done: int, *, gone: bool) -> Any:
        """Leave out the calls of thinned steps, but for those in which a rank ended.

        A wrong call may end all ranks at once: then no later state shows what each of them called.
        One that was stopped because another failed may well call that a clean end.
        """
        is_thinned = (slots["flags"] & schema.FLAG_THINNED) != 0
        is_clean = self.reader.u8(ring.ENDED_AT) not in (ring.RUNNING, ring.EXCEPTION)
        if not gone or (is_clean and last_done >= self.reader.u64(ring.STEP_AT)):
            return slots[~is_thinned]
        is_seen = slots["issued_by"] != _BY_NONE  # else what was called is not known
        is_last = is_thinned & is_seen & self._is_of_this_step(slots)
        slots["flags"][is_last] &= ~np.uint8(schema.FLAG_THINNED)
        is_without_end = is_last & (slots["ended_ns"] == 0)
        slots["state"][is_without_end] = np.minimum(slots["state"][is_without_end], schema.RETURNED)
        return slots[~is_thinned | is_last]

    def _close_thinned(self, slots: Any) -> None:
        """End what DDP called in thinned steps when its backward pass is over: none is reported."""
        called = schema.FLAG_THINNED | schema.FLAG_BY_ENGINE
        if self.reader.u64(ring.ENGINE_NUMBER_AT):  # a backward pass that has called is under way
            phase = self.reader.u8(ring.PHASE_AT)
            is_backward = phase == schema.PHASES.index("backward")
            since = self.reader.u64(ring.PHASE_SINCE_AT) if is_backward else 0
            is_over = ~self._is_of_this_step(slots)
            is_over |= slots["arrived_ns"] < since
        else:
            is_over = np.ones(len(slots), dtype=bool)
        ended = is_over & ((slots["flags"] & called) == called)
        slots["state"][ended & (slots["state"] < schema.ENDED)] = schema.ENDED

    def save(self, offsets: RankOffsets) -> None:
        """Write how far this ring has been read."""
        offsets.read_to = self._read_to
        offsets.open_ranges = to_ranges(self._open)

    def _look_back(self) -> None:
        """Learn the standing of the groups from slots that an earlier collector took."""
        head = min(self._head(gone=False), self._read_to)
        numbers = np.arange(max(0, head - self.reader.num_slots), head, dtype=np.int64)
        slots, state = self.reader.read(numbers)
        self.tracker.update(slots[state == 1])

    def _head(self, gone: bool) -> int:
        return _head_of(self.reader, self._read_to, is_final=gone)

    def _final(self, slots: Any, numbers: Any, now_ns: int, head: int, gone: bool) -> Any:
        if gone:
            return np.ones(len(slots), dtype=bool)
        ended = (slots["state"] >= schema.ENDED) & (
            slots["ended_ns"].astype(np.int64) + SETTLE_NS <= now_ns
        )
        too_old = numbers < head - int(self.reader.num_slots * _KEEP_RATIO)
        # the end of a thinned call is that of its step
        is_held = ((slots["flags"] & schema.FLAG_THINNED) != 0) & self._is_of_this_step(slots)
        return too_old | ((ended | self._endless(slots, numbers, now_ns)) & ~is_held)

    def _is_of_this_step(self, slots: Any) -> Any:
        return slots["step"] == self.reader.u64(ring.STEP_AT)

    def _endless(self, slots: Any, numbers: Any, now_ns: int) -> Any:
        collectives, p2p = self.tracker.endless_groups()
        held = np.isin(slots["group_id"], self._ends.held)
        if not collectives and not p2p and not held.any():
            return np.zeros(len(slots), dtype=bool)
        is_p2p = (slots["flags"] & schema.FLAG_P2P) != 0
        of_these = (np.isin(slots["group_id"], collectives) & ~is_p2p) | (
            np.isin(slots["group_id"], p2p) & is_p2p
        )
        of_these = (of_these | held) & ~np.isin(numbers, self._ends.in_flight)
        old = slots["arrived_ns"].astype(np.int64) + np.where(held, HELD_NS, ENDLESS_NS) <= now_ns
        return of_these & old & (slots["state"] == schema.RETURNED)


class StepFollower:
    """The ring of steps of one process; a step is final as soon as it is whole.

    `read` may raise ring.RingDamaged: the head is not one that the slots could have.
    """

    def __init__(self, reader: ring.RingReader, offsets: RankOffsets) -> None:
        self.reader = reader
        self._read_to = offsets.steps_to

    def read(self) -> tuple[Any, int, bool]:
        """Return (steps, how many were overwritten unread, whether there is more)."""
        head = _head_of(self.reader, self._read_to, is_final=False)
        lost = max(0, head - self.reader.num_slots - self._read_to)
        self._read_to += lost
        upto = max(min(head, self._read_to + MAX_NEW), self._read_to)
        numbers = np.arange(self._read_to, upto, dtype=np.int64)
        slots, state = self.reader.read(numbers)
        lost += int((state == -1).sum())
        self._read_to = upto
        return slots[state == 1], lost, upto < head

    def last_done(self) -> int:
        """Return the newest step, 0 where there is none."""
        newest = min(self.reader.u64(ring.HEAD_AT), _MAX_HEAD) - 1
        slots, state = self.reader.read(np.array([newest], np.int64))
        return int(slots["step"][0]) if newest >= 0 and state[0] == 1 else 0

    def save(self, offsets: RankOffsets) -> None:
        """Write how far this ring has been read."""
        offsets.steps_to = self._read_to


def _head_of(reader: ring.RingReader, read_to: int, *, is_final: bool) -> int:
    """Return how many slots were begun; the slots are asked too where it may be wrong.

    Raises ring.RingDamaged for a head that the slots cannot have.
    """
    reader.check_size()
    head = max(reader.u64(ring.HEAD_AT), read_to)
    if not is_final and head - read_to <= reader.num_slots:
        return head
    # a thread that wrote late may have set the head back: the slots know better
    numbers = reader.read(np.arange(0, reader.num_slots))[0]["number"]
    highest = int(numbers.max())
    if abs(head - highest) > reader.num_slots or highest > _MAX_HEAD:
        raise ring.RingDamaged(f"{reader.path}: head {head}, but the highest slot is {highest}")
    return max(head, highest)


def _have_names(group_ids: Any, known: Container[int]) -> Any:
    distinct, places = np.unique(group_ids, return_inverse=True)
    return np.array([group_id in known for group_id in distinct.tolist()], dtype=bool)[places]
