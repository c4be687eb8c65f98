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
from typing import Any

from rankscope.files import ring
from rankscope.native.hotpath import WaitCore
from rankscope.native.hotpath.waits import NO_ENGINE, slots
from rankscope.wire import schema

# in words of 8 bytes, as in the recorder
_ARRIVED = ring.field_offset(ring.COLLECTIVE_FIELDS, "arrived_ns") // 8
_BLOCKED = ring.field_offset(ring.COLLECTIVE_FIELDS, "blocked_ns") // 8
_HEAD, _ENGINE_NUMBER = ring.HEAD_AT // 8, ring.ENGINE_NUMBER_AT // 8
_THREAD_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "thread_id")
_STATE_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "state")
_FLAGS_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "flags")
_U32 = struct.Struct("<I")


class BackwardWait(WaitCore):
    """The same of DDP whose buckets go through a hook in Python too."""

    def __init__(self, writer: ring.RingWriter) -> None:
        super().__init__(writer)
        self._buffer, self._words, self._offset = writer.buffer, writer.words, writer.offset
        # models whose buckets go through such a hook: the engine does not call then
        self.with_hooks: weakref.WeakSet[Any] = weakref.WeakSet()

    def ends_in_wait(self) -> bool:
        """Return whether DDP will wait at the end of this pass for what it has issued in it."""
        return self._words[_ENGINE_NUMBER] > 0 or bool(self.with_hooks)

    def end(self, now_ns: int) -> int:
        """Return how long DDP waited, in ns; 0 if it did not. The pass is over at `now_ns`."""
        blocked_ns = self.end_of_engine(now_ns)
        if blocked_ns != NO_ENGINE:
            return blocked_ns
        number = self._last_of_hooks() if self.with_hooks else -1
        if number < 0:
            return 0
        at = self._offset(number)
        has_ended = self._buffer[at + _STATE_AT] >= schema.ENDED
        return self.end_of(number, self._words[(at >> 3) + _ARRIVED], has_ended, 0.0, now_ns)

    def _last_of_hooks(self) -> int:
        """Return the last collective that a hook in Python began in this thread, -1 for none.

        What a caller waited for in Python is none: DDP waits for what a hook returns.
        """
        buffer, words, thread = self._buffer, self._words, threading.get_native_id()
        for number in slots(self.begun_at, words[_HEAD] - 1):
            at = self._offset(number)
            (its_thread,) = _U32.unpack_from(buffer, at + _THREAD_AT)
            if buffer[at + _FLAGS_AT] & schema.FLAG_ASYNC and its_thread == thread:
                return -1 if words[(at >> 3) + _BLOCKED] else number
        return -1
