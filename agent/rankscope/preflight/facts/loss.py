"""Loss along a path, which is one direction: what both ends counted of each other's datagrams."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.preflight.facts.edges import EdgeFacts


@dataclass(frozen=True)
class Lost:
    """Datagrams along a path."""

    num_sent: int
    num_lost: int

    @property
    def ratio(self) -> float:
        """Return the share that was lost, 0 to 1."""
        return self.num_lost / self.num_sent if self.num_sent else 0.0


def along(edge: EdgeFacts | None, back: EdgeFacts | None) -> Lost | None:
    """Return what was lost from the start of `edge` to its end; None where that is not known.

    Its start sent datagrams, of which the end counted the arrived ones; and it answered those of
    the end (`back`), of which the end counted the answers.
    """
    num_sent = num_lost = 0
    there = edge.datagrams if edge is not None else None
    if there is not None and there.num_arrived >= 0:
        num_sent += there.num_sent
        num_lost += max(0, there.num_sent - there.num_arrived)
    here = back.datagrams if back is not None else None
    if here is not None and here.num_arrived >= 0:
        num_sent += here.num_arrived
        num_lost += max(0, here.num_arrived - here.num_answered)
    return Lost(num_sent, num_lost) if num_sent else None
