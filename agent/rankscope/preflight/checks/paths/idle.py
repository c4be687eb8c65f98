"""net.idle: connections on which nobody speaks for a while."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.pairs import shortened
from rankscope.preflight.checks.paths.quality import blamed, both_ends, who
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetIdle:
    """A connection that is silent for a minute still carries what is sent then.

    NAT and firewalls forget idle connections without a word; a checkpoint makes them idle.
    """

    id: ClassVar[str] = "net.idle"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "deep"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where an idle connection was lost."""
        held = {(a, b): edge.idle for a, b, edge in both_ends(run) if edge.idle is not None}
        if not held:
            title = "no idle connection was held"
            yield Finding(id=self.id, status="skipped", title=title)
        lost = {path: idle for path, idle in held.items() if idle.error}
        for one, nodes in blamed(lost, held):
            first = lost[one.paths[0]]
            yield Finding(
                id=self.id,
                status="warn",
                title=f"{who(run, one)}: a connection idle for {first.silent_s:.0f} s is lost",
                nodes=nodes,
                edges=one.paths,
                evidence={"silent_s": first.silent_s, "error": first.error},
                told=shortened(
                    f"{a}->{b}  {lost[a, b].error} after {lost[a, b].silent_s:.0f} s of silence"
                    for a, b in one.paths
                ),
                fix=(
                    Fix(
                        command="sudo sysctl -w net.ipv4.tcp_keepalive_time=30 "
                        "net.ipv4.tcp_keepalive_intvl=10",
                        owner="admin",
                    ),
                ),
                wrong_if="the peer's agent was stopped meanwhile",
            )
