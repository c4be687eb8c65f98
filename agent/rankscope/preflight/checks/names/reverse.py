"""dns.reverse: addresses have names, or have none at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Tier

SLOW_MS = 1000.0  # the store asks at each connection: at 64 ranks that adds a minute


class DnsReverse:
    """The resolver answers at once when asked which name an address has."""

    id: ClassVar[str] = "dns.reverse"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where the slowest answer, or its absence, took more than a second."""
        yield from not_measured(self.id, run, "names")
        slow = {}
        for report in run.present:
            names = report.facts.names
            if names is not None and names.reverse_ms > SLOW_MS:
                slow[report.node] = names
        if not slow:
            return
        node, worst = max(slow.items(), key=lambda item: item[1].reverse_ms)
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(slow),
            title=f"{listed(slow)}: the name of {worst.reverse_of} takes "
            f"{worst.reverse_ms / 1e3:.1f} s to look up",
            evidence={n: {"reverse_ms": facts.reverse_ms} for n, facts in slow.items()},
            told=(f"{node}: getnameinfo({worst.reverse_of}): {worst.reverse_ms:.0f} ms",),
            fix=tuple(
                Fix(
                    node=n,
                    command=f"echo '{facts.reverse_of} {_name(run, facts.reverse_of)}' "
                    "| sudo tee -a /etc/hosts",
                    owner="admin",
                )
                for n, facts in slow.items()
            ),
            would="the store of c10d asks at each connection it accepts: the start is slow",
            wrong_if="the resolver was busy just then",
        )


def _name(run: Run, address: str) -> str:
    """Return the node that has an address."""
    return next((r.node for r in run.present if address in r.addresses), "NAME")
