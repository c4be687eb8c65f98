"""Paths that leave by another interface than the one whose address a node tells the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.preflight.checking import Run
from rankscope.preflight.checks.interfaces.real import interface_with
from rankscope.preflight.checks.launch.local import is_local
from rankscope.preflight.facts.interfaces import Interface

STRICT = 1  # rp_filter: drop what comes in where the reply would not go out


@dataclass(frozen=True)
class Crooked:
    """The way from `node` to `peer` leaves by `leaves_by`, the reply comes in by `told`."""

    node: str
    peer: str
    told: Interface
    told_address: str
    leaves_by: Interface
    source_address: str
    is_broken: bool  # a dial between the two has failed, in either direction

    @property
    def is_strict(self) -> bool:
        """Whether the kernel of `node` drops what comes in by the interface it tells."""
        return self.told.rp_filter == STRICT


def crooked_paths(run: Run) -> Iterator[Crooked]:
    """Yield the paths whose two directions use different interfaces of a node."""
    for node, peer, edge in run.edges():
        facts = run.reports[node].facts.interfaces
        told_address = run.gloo_address(node)
        if facts is None or not told_address or is_local(told_address):
            continue
        told = interface_with(facts, told_address)
        leaves_by = interface_with(facts, edge.source_address)
        if told is None or leaves_by is None or told.name == leaves_by.name:
            continue
        if told.is_loopback or told.kind or leaves_by.is_loopback:
            continue  # other checks' business: that address is no good for any peer
        yield Crooked(
            node=node,
            peer=peer,
            told=told,
            told_address=told_address,
            leaves_by=leaves_by,
            source_address=edge.source_address,
            is_broken=_has_failed(run, node, peer) or _has_failed(run, peer, node),
        )


def _has_failed(run: Run, start: str, end: str) -> bool:
    edge = run.edge(start, end)
    if edge is None:
        return False
    dials = [*edge.ephemeral, *(d for d in (edge.mesh, edge.master) if d is not None)]
    return any(dial.outcome not in ("ok", "refused", "unresolved") for dial in dials)
