"""net.nic: the interfaces that the job uses are as fast and as clean as the others'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import by_value, listed, not_measured
from rankscope.preflight.checks.interfaces.real import interface_with
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier

# Ethernet allows 1e-12 bit errors, 1e-8 of full packets: this is 10,000 times more
_MAX_ERROR_RATIO = 1e-4
_MIN_ERRORS = 1000  # fewer say nothing: a cable that was plugged in makes some
_MAX_CARRIER_CHANGES = 100  # since boot; a start makes 2 to 6, a bad cable hundreds a day


class NetNic:
    """The interface that the job uses has full duplex, the usual speed, a link and no errors."""

    id: ClassVar[str] = "net.nic"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail without a link; warn on what makes it slow."""
        yield from not_measured(self.id, run, "interfaces")
        used = {r.node: row for r in run.present if (row := _used(run, r.node)) is not None}
        for node, row in used.items():
            for status, fault in _faults(row):
                yield self._finding((node,), row, status, fault)
        yield from self._slower(used)

    def _slower(self, used: dict[str, Interface]) -> Iterator[Finding]:
        speeds = {node: row.speed_mbit for node, row in used.items() if row.speed_mbit > 0}
        groups = by_value(speeds)
        usual = next(iter(groups), 0)
        if not usual or 2 * len(groups[usual]) <= len(speeds):
            return  # no majority, no reproach
        for speed, nodes in groups.items():
            if speed < usual:
                fault = f"runs at {speed} Mbit/s, most others at {usual} Mbit/s"
                yield self._finding(nodes, used[nodes[0]], "warn", fault)

    def _finding(
        self, nodes: tuple[str, ...], row: Interface, status: Status, fault: str
    ) -> Finding:
        return Finding(
            id=self.id,
            status=status,
            nodes=nodes,
            title=f"{listed(nodes)}: {row.name} {fault}",
            evidence={
                "interface": row.name,
                "speed_mbit": row.speed_mbit,
                "duplex": row.duplex,
                "num_errors": row.num_errors,
                "num_packets": row.num_packets,
                "carrier_changes": row.carrier_changes,
            },
            fix=(Fix(command=f"ethtool {row.name}; ethtool -S {row.name}", owner="admin"),),
            would="no connection" if status == "fail" else "every step waits for it",
            wrong_if="" if status == "fail" else "the counters are from long ago, the speed meant",
            confidence="proven" if status == "fail" else "likely",
        )


def _used(run: Run, node: str) -> Interface | None:
    """Return the interface of the address that the job tells the others."""
    facts = run.reports[node].facts.interfaces
    address = run.gloo_address(node)
    if facts is not None and run.backend == "nccl" and facts.nccl:
        address = facts.nccl[0].address
    row = interface_with(facts, address) if facts is not None and address else None
    return None if row is None or row.is_loopback or row.kind else row


def _faults(row: Interface) -> Iterator[tuple[Status, str]]:
    if row.has_carrier is False:
        yield "fail", "has no link"
    if row.duplex == "half":
        yield "warn", "runs at half duplex"
    ratio = row.num_errors / row.num_packets if row.num_packets else 0.0
    if row.num_errors >= _MIN_ERRORS and ratio > _MAX_ERROR_RATIO:
        yield "warn", f"has {row.num_errors} errors in {row.num_packets} packets since boot"
    if row.carrier_changes > _MAX_CARRIER_CHANGES:
        yield "warn", f"lost or found its link {row.carrier_changes} times since boot"
