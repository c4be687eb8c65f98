"""What DDP waits at the end of a backward pass, as `rankscope.rank.backward_wait` says; in Python.

`hotpath.cpp` is its twin. Here are the passes whose collectives the autograd engine calls.
"""

from __future__ import annotations

from rankscope.files import ring
from rankscope.files.ring import RingWriter
from rankscope.wire import schema

# in words of 8 bytes, as in the recorder
_ARRIVED = ring.field_offset(ring.COLLECTIVE_FIELDS, "arrived_ns") // 8
_BLOCKED = ring.field_offset(ring.COLLECTIVE_FIELDS, "blocked_ns") // 8
_BYTES = ring.field_offset(ring.COLLECTIVE_FIELDS, "input_bytes") // 8
_HEAD, _LATEST_END = ring.HEAD_AT // 8, ring.LATEST_END_AT // 8
_ENGINE_NUMBER, _ENGINE_ARRIVED = ring.ENGINE_NUMBER_AT // 8, ring.ENGINE_ARRIVED_AT // 8
_ENGINE_SITE = ring.ENGINE_SITE_AT // 8
_STATE_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "state")
_FLAGS_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "flags")
AT_ONCE = 4  # buckets whose ends can be reported in another order than DDP waits for them
MOST_LOOKED_AT = 64  # slots of one pass
FIRST_PASSES = 8  # what follows the wait is the shortest of these; later a longer or shorter one
LONGER, SHORTER = 32, 2  # counts for one in so many
MOST_COPIED = 20  # copying between buckets is at most one in so many of a wait
SIZES_HOLD = 16  # passes of the same number and last size, then the others are looked at again
NO_ENGINE = -1  # the engine called no collective in this pass


def slots(begun_at: int, last: int) -> range:
    """Return the numbers of the latest collectives since `begun_at`, the last one first."""
    return range(last, max(begun_at - 1, last - MOST_LOOKED_AT), -1)


class WaitCore:
    """Looks at the collectives of one backward pass after the other, in the training thread."""

    def __init__(self, writer: RingWriter) -> None:
        self._buffer, self._words, self._offset = writer.buffer, writer.words, writer.offset
        self.begun_at = 0  # slots begun before this pass
        self.after_ns = 0  # from the end of the wait to the end of the pass
        self.num_known = 0  # passes whose ends were reported in time
        self._copied = 0.0  # of what the last bucket holds, how often the earlier ones hold it
        self._copied_of = (0, 0)  # slots of the pass and bytes of its last bucket, of that figure
        self._copied_for = 0  # more passes that look the same

    def begin(self) -> None:
        """Forget the collectives and the call site of the pass before."""
        words = self._words
        words[_ENGINE_NUMBER] = words[_ENGINE_SITE] = 0
        self.begun_at = words[_HEAD]

    def end_of_engine(self, now_ns: int) -> int:
        """Return how long DDP waited for what the engine called, in ns, or NO_ENGINE.

        The pass is over at `now_ns`.
        """
        words = self._words
        number = words[_ENGINE_NUMBER] - 1
        if number < 0:
            return NO_ENGINE
        words[_ENGINE_NUMBER] = 0
        is_known = False
        if not self._buffer[ring.THINNED_AT]:
            is_known = self._have_ended(number)
            self._look_at_sizes(number)
        return self.end_of(number, words[_ENGINE_ARRIVED], is_known, self._copied, now_ns)

    def end_of(
        self, number: int, arrived_ns: int, is_known: bool, copied: float, now_ns: int
    ) -> int:
        """Return how long it waited for its last collective, and add that to its slot.

        `is_known`: its end was reported; `copied`: what its other buckets hold, by its own.
        """
        ended_ns = min(self._words[_LATEST_END], now_ns) if is_known else 0
        if is_known:
            self._learn(now_ns - ended_ns)
        if not self.num_known:
            return 0
        blocked_ns: int = max(0, max(ended_ns, now_ns - self.after_ns) - arrived_ns)
        blocked_ns -= min(int(copied * self.after_ns), blocked_ns // MOST_COPIED)
        word = self._offset(number) >> 3
        if self._words[word] == number + 1:
            self._words[word + _BLOCKED] += blocked_ns
        return blocked_ns

    def _learn(self, after_ns: int) -> None:
        if self.num_known < FIRST_PASSES:
            self.after_ns = min(self.after_ns, after_ns) if self.num_known else after_ns
        else:
            longer_ns = after_ns - self.after_ns
            self.after_ns += longer_ns // (LONGER if longer_ns > 0 else SHORTER)
        self.num_known += 1

    def _have_ended(self, last: int) -> bool:
        """Return whether the ends of the engine's last collectives are known."""
        buffer, offset, seen = self._buffer, self._offset, 0
        for number in slots(self.begun_at, last):
            at = offset(number)
            if not buffer[at + _FLAGS_AT] & schema.FLAG_BY_ENGINE:
                continue
            if buffer[at + _STATE_AT] < schema.ENDED:
                return False
            seen += 1
            if seen == AT_ONCE:
                break
        return True

    def _look_at_sizes(self, last: int) -> None:
        """See how much the earlier buckets hold; now and then where a pass looks like the last."""
        own = self._words[(self._offset(last) >> 3) + _BYTES]
        looks = last - self.begun_at, own
        self._copied_for -= 1
        if looks != self._copied_of or self._copied_for <= 0:
            self._copied_of, self._copied_for = looks, SIZES_HOLD
            self._copied = self._earlier(last, own)

    def _earlier(self, last: int, own: int) -> float:
        """Return the bytes of the pass's other buckets as a multiple of those of the last.

        Each counts as one at most: what a small last one takes is not the copying of its bytes.
        """
        others = 0
        for number in slots(self.begun_at, last)[1:]:
            at = self._offset(number)
            if self._buffer[at + _FLAGS_AT] & schema.FLAG_BY_ENGINE:
                others += min(own, self._words[(at >> 3) + _BYTES])
        return others / own if own else 0.0
