"""What recording costs the training thread, as it is measured, in the header of a ring."""

from __future__ import annotations

from rankscope.files import ring


class OwnCosts:
    """CPU time inside our own code; C++ sources add theirs in the same places."""

    def __init__(self, writer: ring.RingWriter) -> None:
        self._ring = writer

    def of_calls(self, *, thinned: bool = False) -> tuple[int, int]:
        """Return (CPU ns, calls) of the collectives that were measured."""
        return self._pair(ring.OWN_THINNED_NS_AT if thinned else ring.OWN_NS_AT)

    def add_call(self, cpu_ns: int) -> None:
        """Add the measured cost of recording one collective."""
        is_thinned = self._ring.buffer[ring.THINNED_AT]
        self._add(ring.OWN_THINNED_NS_AT if is_thinned else ring.OWN_NS_AT, cpu_ns)

    def of_switches(self) -> tuple[int, int]:
        """Return (CPU ns, times) of taking kernels out of the dispatcher and putting them in."""
        return self._pair(ring.OWN_SWITCH_NS_AT)

    def add_switch(self, cpu_ns: int) -> None:
        """Add what it took to take them out, or to put them in."""
        self._add(ring.OWN_SWITCH_NS_AT, cpu_ns)

    def _pair(self, at: int) -> tuple[int, int]:
        amount, times = (
            ring.U64.unpack_from(self._ring.buffer, where)[0] for where in (at, at + 8)
        )
        return amount, times

    def _add(self, at: int, cpu_ns: int) -> None:
        self._ring.add(at, cpu_ns)
        self._ring.add(at + 8)
