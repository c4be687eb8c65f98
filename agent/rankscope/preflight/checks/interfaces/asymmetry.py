"""Paths on which a node sends from another address than the one that it tells the others."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.interfaces.real import interface_with
from rankscope.preflight.checks.launch.local import is_local
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts

STRICT = 1  # rp_filter: drop what comes in where the reply would not go out


@dataclass(frozen=True)
class Crooked:
    """`node` tells the others `told_address`, and sends to `peer` from `source_address`."""

    node: str
    peer: str
    told: Interface
    told_address: str
    source: Interface
    source_address: str
    is_broken: bool  # a dial between the two has failed, in either direction
    dropped_by: str = ""  # the node whose strict rp_filter drops one direction
    dropped_at: str = ""  # at that interface

    @property
    def dropped_edge(self) -> tuple[str, str]:
        """The direction that the filter drops."""
        other = self.node if self.dropped_by == self.peer else self.peer
        return other, self.dropped_by


def crooked_paths(run: Run) -> Iterator[Crooked]:
    """Yield the paths whose two directions use different addresses of a node."""
    for node, peer, edge in run.edges():
        told_address = run.gloo_address(node)
        if edge.source_address in ("", told_address) or not told_address or is_local(told_address):
            continue  # nearly all of a million paths end here
        facts = run.reports[node].facts.interfaces
        if facts is None:
            continue
        told = interface_with(facts, told_address)
        source = interface_with(facts, edge.source_address)
        if told is None or source is None or told.name == source.name:
            continue
        if told.is_loopback or told.kind or source.is_loopback:
            continue  # other checks' business: that address is no good for any peer
        dropped_by, dropped_at = _filter(run, node, peer, told, edge.source_address)
        yield Crooked(
            node=node,
            peer=peer,
            told=told,
            told_address=told_address,
            source=source,
            source_address=edge.source_address,
            is_broken=_has_failed(run, node, peer) or _has_failed(run, peer, node),
            dropped_by=dropped_by,
            dropped_at=dropped_at,
        )


def _filter(
    run: Run, node: str, peer: str, told: Interface, source_address: str
) -> tuple[str, str]:
    """Return which node's filter drops, and at which interface; ("", "") if none does.

    The peer drops what comes from an address that it would answer by another interface; the node
    itself drops what comes in by the interface it tells, if its own way back is another one.
    """
    report = run.reports.get(peer)
    theirs = report.facts.interfaces if report is not None else None
    if theirs is not None and _has_failed(run, node, peer):
        entry = interface_with(theirs, run.gloo_address(peer))
        if entry is not None and entry.rp_filter == STRICT:
            if _network_of(theirs, source_address) not in ("", entry.name):
                return peer, entry.name
    if told.rp_filter == STRICT and _has_failed(run, peer, node):
        return node, told.name
    return "", ""


def _network_of(facts: InterfaceFacts, address: str) -> str:
    """Return the interface in whose subnet an address lies: that is where replies leave."""
    target = ipaddress.ip_address(address)
    for row in facts.interfaces:
        if row.is_up and any(target in ipaddress.ip_interface(t).network for t in row.addresses):
            return row.name
    return ""


def _has_failed(run: Run, start: str, end: str) -> bool:
    edge = run.edge(start, end)
    if edge is None:
        return False
    dials = [*edge.ephemeral, *(d for d in (edge.mesh, edge.master) if d is not None)]
    return any(dial.outcome not in ("ok", "refused", "unresolved") for dial in dials)
