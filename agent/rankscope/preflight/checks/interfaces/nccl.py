"""net.iface.nccl: NCCL takes real interfaces only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.interfaces.real import best_interface
from rankscope.preflight.facts.interfaces import Choice, kind_of
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetIfaceNccl:
    """NCCL takes no bridge, tunnel or loopback among its interfaces.

    It leaves out only names that begin with docker, lo and virbr: br-*, cni0, veth* and others
    are taken, and it connects over each of them.
    """

    id: ClassVar[str] = "net.iface.nccl"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn on a virtual interface among the chosen; fail where it comes first."""
        if run.backend != "nccl":
            yield Finding(id=self.id, status="skipped", title=f"the backend is {run.backend}")
            return
        yield from not_measured(self.id, run, "interfaces")
        groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
        for report in run.present:
            facts = report.facts.interfaces
            bad = [c.interface for c in facts.nccl if _is_bad(c)] if facts is not None else []
            if bad and facts is not None:
                is_first = facts.nccl[0].interface == bad[0]
                groups.setdefault((is_first, tuple(bad)), []).append(report.node)
        for (is_first, names), nodes in groups.items():
            yield self._finding(run, is_first, names, nodes)

    def _finding(self, run: Run, is_first: bool, bad: tuple[str, ...], nodes: list[str]) -> Finding:
        kinds = ", ".join(f"{name} ({kind_of(name) or 'loopback'})" for name in bad)
        return Finding(
            id=self.id,
            status="fail" if is_first else "warn",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: NCCL will take {kinds}" + (" first" if is_first else " too"),
            evidence={node: _chosen(run, node) for node in nodes},
            told=tuple(f"{node}: {', '.join(_chosen(run, node))}" for node in nodes[:4]),
            fix=tuple(
                Fix(node=node, command=f"export NCCL_SOCKET_IFNAME=={name}")
                for node in nodes
                if (name := best_interface(run, node))
            ),
            would="NCCL init: ranks cannot reach the address that NCCL tells them, and hang or "
            "fail after 34 tries"
            if is_first
            else "NCCL connects over it as well: init hangs where the other end has none",
            wrong_if="NCCL uses InfiniBand or a plugin, and the nodes reach each other by it",
            confidence="likely",
        )


def _is_bad(choice: Choice) -> bool:
    is_loopback = choice.interface == "lo"
    return bool(choice.interface) and (is_loopback or bool(kind_of(choice.interface)))


def _chosen(run: Run, node: str) -> list[str]:
    facts = run.reports[node].facts.interfaces
    return [f"{c.interface} {c.address}" for c in facts.nccl] if facts is not None else []
