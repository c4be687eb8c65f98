"""Which interface of a node is the real one: what the checks of this family recommend."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts


def best_interface(run: Run, node: str) -> str:
    """Return the interface to recommend: one by which peers were reached, else the first real."""
    facts = run.reports[node].facts.interfaces
    if facts is None:
        return ""
    used = {edge.source_address for edge in run.reports[node].edges.values()}
    real = [row for row in facts.interfaces if is_real(row)]
    reached = [row for row in real if used & set(addresses_of(row))]
    return next((row.name for row in (*reached, *real)), "")


def is_real(row: Interface) -> bool:
    """Return whether an interface may carry traffic to other machines."""
    return row.is_up and not row.is_loopback and not row.kind and bool(row.addresses)


def addresses_of(row: Interface) -> Iterator[str]:
    """Yield the addresses without their prefix length."""
    for text in row.addresses:
        yield text.partition("/")[0]


def interface_with(facts: InterfaceFacts, address: str) -> Interface | None:
    """Return the interface that has an address."""
    return next((row for row in facts.interfaces if address in addresses_of(row)), None)
