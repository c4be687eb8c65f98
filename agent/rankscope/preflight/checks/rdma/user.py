"""ib.user: whether this user may use the adapters, and whether they make errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.checks.rdma.chosen import chosen
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class IbUser:
    """This user may open the RDMA adapters, the library is there, and no port makes errors."""

    id: ClassVar[str] = "ib.user"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"rdma"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where an adapter is closed, warn of the rest."""
        yield from not_measured(self.id, run, "rdma")
        if run.backend != "nccl":
            yield Finding(id=self.id, status="skipped", title=f"{run.backend} does not use RDMA")
            return
        yield from self._closed(run)
        yield from self._errors(run)
        yield from self._mtu(run)

    def _closed(self, run: Run) -> Iterator[Finding]:
        reasons: dict[str, list[str]] = {}
        for report in run.present:
            rdma = report.facts.rdma
            if rdma is None or not rdma.ports:
                continue
            devices = {port.device for port in chosen(rdma)}
            closed = [rdma.verbs.get(name, "no /dev/infiniband/uverbs* for it") for name in devices]
            why = next((text for text in sorted(closed) if text), "")
            if not why and not rdma.has_library:
                why = "libibverbs.so.1 is not installed"
            if why:
                reasons.setdefault(why, []).append(report.node)
        for why, nodes in reasons.items():
            is_library = "libibverbs" in why
            command = (
                "sudo apt-get install libibverbs1 ibverbs-providers"
                if is_library
                else "ls -l /dev/infiniband   # in a container: --device=/dev/infiniband"
            )
            yield Finding(
                id=self.id,
                status="fail",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: RDMA cannot be used here: {why}",
                evidence={"error": why},
                told=tuple(f"{node}: {why}" for node in nodes),
                fix=tuple(Fix(node=node, command=command, owner="admin") for node in nodes),
                would="NCCL falls back to sockets on this node: a tenth of the bandwidth, or init "
                "fails where the others insist on RDMA",
                wrong_if="the job runs in another container, with the devices",
            )

    def _errors(self, run: Run) -> Iterator[Finding]:
        bad: dict[str, str] = {}
        for report in run.present:
            for port in chosen(report.facts.rdma) if report.facts.rdma is not None else ():
                if port.errors_during:
                    told = ", ".join(f"{name} +{n}" for name, n in port.errors_during.items())
                    bad[report.node] = f"{port.name}: {told}"
        if bad:
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(bad),
                title=f"{listed(bad)}: errors while this preflight ran: {next(iter(bad.values()))}",
                evidence={"errors": bad},
                told=tuple(f"{node}: {text}" for node, text in bad.items()),
                fix=tuple(
                    Fix(node=node, command="sudo perfquery -x; ibdiagnet   # cable or transceiver",
                        owner="admin")
                    for node in bad
                ),
                would="retransmissions: this node is slow, or its connections break under load",
                wrong_if="a cable was touched at that moment",
            )  # fmt: skip

    def _mtu(self, run: Run) -> Iterator[Finding]:
        sizes: dict[str, str] = {}
        for report in run.present:
            for port in chosen(report.facts.rdma) if report.facts.rdma is not None else ():
                if port.state == "ACTIVE" and port.interface_mtu_bytes:
                    sizes[report.node] = f"{port.interface_mtu_bytes} bytes"
        odd = odd_ones(sizes)
        if odd:
            yield Finding(
                id=self.id,
                status="warn",
                nodes=odd,
                title=f"{listed(odd)}: the RoCE interface has an MTU of {sizes[odd[0]]}, "
                "not as elsewhere",
                evidence={"mtu": sizes},
                told=compared(sizes),
                fix=tuple(
                    Fix(node=node, command="ip -br link   # then: sudo ip link set NAME mtu BYTES",
                        owner="admin")
                    for node in odd
                ),
                would="RoCE agrees on the smaller size: slower; or packets are lost in the switch",
                wrong_if="the ports belong to networks of different kinds",
            )  # fmt: skip
