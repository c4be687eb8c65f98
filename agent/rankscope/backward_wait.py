"""How long DDP waited in C++ at the end of a backward pass: no call of Python ever sees that.

From the issue of its last bucket to the end of the last bucket: by then the gradients are done,
what remains is waiting. A bucket's future reports its end, but wakes the waiting thread first and
calls back later (`Future::markCompleted` in ATen/core/ivalue_inl.h): where that callback has not
come when the pass is over, the wait ended just before the pass did. How much just before is learnt
from the passes whose ends are known: the copying of buckets into gradients. What a pass takes
beyond that the thread was still waiting, for a processor to wake up on. Each bucket is copied when
its wait is over, so the earlier ones are copied meanwhile: that is taken off by their bytes, and
never more than a small part of the wait, as it is not measured. On a device no end is reported, and
the thread does not wait.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

from rankscope import ring, schema

# in words of 8 bytes, as in the recorder
_ARRIVED = ring.field_offset(ring.COLLECTIVE_FIELDS, "arrived_ns") // 8
_BLOCKED = ring.field_offset(ring.COLLECTIVE_FIELDS, "blocked_ns") // 8
_BYTES = ring.field_offset(ring.COLLECTIVE_FIELDS, "input_bytes") // 8
_HEAD, _LATEST_END = ring.HEAD_AT // 8, ring.LATEST_END_AT // 8
_ENGINE_NUMBER, _ENGINE_ARRIVED = ring.ENGINE_NUMBER_AT // 8, ring.ENGINE_ARRIVED_AT // 8
_ENGINE_SITE = ring.ENGINE_SITE_AT // 8
_THREAD_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "thread_id")
_STATE_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "state")
_FLAGS_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "flags")
_AT_ONCE = 4  # buckets whose ends can be reported in another order than DDP waits for them
_MOST_LOOKED_AT = 64  # slots of one pass
_FIRST_PASSES = 8  # what follows the wait is the shortest of these; later a longer or shorter one
_LONGER, _SHORTER = 32, 2  # counts for one in so many
_MOST_COPIED = 20  # copying between buckets is at most one in so many of a wait
_SIZES_HOLD = 16  # passes of the same number and last size, then the others are looked at again
_U32 = struct.Struct("<I")


class BackwardWait:
    """Looks at the collectives of one backward pass after the other, in the main thread."""

    def __init__(self, writer: ring.RingWriter, blocked: Callable[[int, int], None]) -> None:
        """`blocked` adds waiting, in ns, to the slot of a number."""
        self._buffer, self._words = writer.buffer, writer.words
        self._offset = writer.offset
        self._blocked = blocked
        self._begun_at = 0  # slots begun before this pass
        self._after_ns = 0  # from the end of the wait to the end of the pass
        self._num_known = 0  # passes whose ends were reported in time
        self._copied = 0.0  # of what the last bucket holds, how often the earlier ones hold it
        self._copied_of = (0, 0)  # slots of the pass and bytes of its last bucket, of that figure
        self._copied_for = 0  # more passes that look the same
        # models under DDP whose buckets go through a hook in Python: the engine does not call then
        self.with_hooks: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> None:
        """Forget the collectives and the call site of the pass before."""
        words = self._words
        words[_ENGINE_NUMBER] = words[_ENGINE_SITE] = 0
        self._begun_at = words[_HEAD]

    def ends_in_wait(self) -> bool:
        """Return whether DDP will wait at the end of this pass for what it has issued in it."""
        return self._words[_ENGINE_NUMBER] > 0 or bool(self.with_hooks)

    def end(self, now_ns: int) -> int:
        """Return how long DDP waited, in ns; 0 if it did not. The pass is over at `now_ns`."""
        words = self._words
        number = words[_ENGINE_NUMBER] - 1
        is_known, copied = False, 0.0
        if number >= 0:
            words[_ENGINE_NUMBER] = 0
            arrived = words[_ENGINE_ARRIVED]
            if not self._buffer[ring.THINNED_AT]:
                is_known = self._have_ended(number)
                self._look_at_sizes(number)
            copied = self._copied
        elif self.with_hooks:
            number = self._last_of_hooks()
            if number < 0:
                return 0
            is_known = self._has_ended(number)
            arrived = words[(self._offset(number) >> 3) + _ARRIVED]
        else:
            return 0
        ended_ns = min(words[_LATEST_END], now_ns) if is_known else 0
        if is_known:
            self._learn(now_ns - ended_ns)
        if not self._num_known:
            return 0
        blocked_ns: int = max(0, max(ended_ns, now_ns - self._after_ns) - arrived)
        blocked_ns -= min(int(copied * self._after_ns), blocked_ns // _MOST_COPIED)
        self._blocked(number, blocked_ns)
        return blocked_ns

    def _learn(self, after_ns: int) -> None:
        if self._num_known < _FIRST_PASSES:
            shortest = min(self._after_ns, after_ns) if self._num_known else after_ns
            self._after_ns = shortest
        else:
            longer_ns = after_ns - self._after_ns
            self._after_ns += longer_ns // (_LONGER if longer_ns > 0 else _SHORTER)
        self._num_known += 1

    def _slots(self, last: int) -> range:
        return range(last, max(self._begun_at - 1, last - _MOST_LOOKED_AT), -1)

    def _have_ended(self, last: int) -> bool:
        """Return whether the ends of the engine's last collectives are known."""
        buffer, offset, seen = self._buffer, self._offset, 0
        for number in self._slots(last):
            at = offset(number)
            if not buffer[at + _FLAGS_AT] & schema.FLAG_BY_ENGINE:
                continue
            if buffer[at + _STATE_AT] < schema.ENDED:
                return False
            seen += 1
            if seen == _AT_ONCE:
                break
        return True

    def _look_at_sizes(self, last: int) -> None:
        """See how much the earlier buckets hold; now and then where a pass looks like the last."""
        own = self._words[(self._offset(last) >> 3) + _BYTES]
        looks = last - self._begun_at, own
        self._copied_for -= 1
        if looks != self._copied_of or self._copied_for <= 0:
            self._copied_of, self._copied_for = looks, _SIZES_HOLD
            self._copied = self._earlier(last, own)

    def _earlier(self, last: int, own: int) -> float:
        """Return the bytes of the pass's other buckets as a multiple of those of the last.

        Each counts as one at most: what a small last one takes is not the copying of its bytes.
        """
        others = 0
        for number in self._slots(last)[1:]:
            at = self._offset(number)
            if self._buffer[at + _FLAGS_AT] & schema.FLAG_BY_ENGINE:
                others += min(own, self._words[(at >> 3) + _BYTES])
        return others / own if own else 0.0

    def _has_ended(self, number: int) -> bool:
        return self._buffer[self._offset(number) + _STATE_AT] >= schema.ENDED

    def _last_of_hooks(self) -> int:
        """Return the last collective that a hook in Python began in this thread, -1 for none.

        What somebody waited for in Python is none: DDP waits for what a hook returns.
        """
        buffer, words, thread = self._buffer, self._words, threading.get_native_id()
        for number in self._slots(words[_HEAD] - 1):
            at = self._offset(number)
            (its_thread,) = _U32.unpack_from(buffer, at + _THREAD_AT)
            if buffer[at + _FLAGS_AT] & schema.FLAG_ASYNC and its_thread == thread:
                return -1 if words[(at >> 3) + _BLOCKED] else number
        return -1
