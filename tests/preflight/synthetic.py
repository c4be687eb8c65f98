"""Runs of healthy nodes in one line, of which single facts are then changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import (
    Bandwidth,
    Clock,
    Datagrams,
    Dial,
    EdgeFacts,
    PathMtu,
    Rtt,
)
from rankscope.preflight.facts.endpoint import Endpoint, NodeList
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.facts.names import HostsLine, NameFacts
from rankscope.preflight.facts.ports import PortFacts
from rankscope.preflight.model import Facts, Listening, NodeReport
from rankscope.preflight.options import Options
from rankscope.preflight.system import Resolved

PORT = 29500
RANDOM = (33000, 47000, 60000)
GRID = tuple(range(33300, 60999, 1176))  # 24 of them
TOOK_MS = {"drop": 1500.0, "refused": 0.4, "prohibited": 1.5, "no-arp": 3060.0, "no-route": 0.1}
ERRNO = {
    "drop": "ETIMEDOUT", "refused": "ECONNREFUSED", "prohibited": "EHOSTUNREACH",
    "no-arp": "EHOSTUNREACH", "no-route": "ENETUNREACH", "local-firewall": "EPERM",
}  # fmt: skip


def address(number: int) -> str:
    return f"10.77.{number // 250}.{number % 250 + 1}"


def dial(to: str, where: str, port: int, outcome: str = "ok", **fields: Any) -> Dial:
    return Dial(
        outcome=outcome, address=where, port=port, elapsed_ms=TOOK_MS.get(outcome, 0.3),
        errno=ERRNO.get(outcome, ""), answered_by=to if outcome == "ok" else "", **fields,
    )  # fmt: skip


@dataclasses.dataclass
class Cluster:
    """Reports and edges that can be changed before `run` puts them together."""

    names: tuple[str, ...]
    mode: str = "static"
    backend: str = "gloo"
    tools: tuple[str, ...] = ("ufw", "nft")
    options: Options = dataclasses.field(default_factory=Options)
    peers: dict[str, tuple[str, ...]] | None = None  # whom each node probes; None: everybody

    def __post_init__(self) -> None:
        self.options = msgspec.structs.replace(self.options, backend=self.backend)
        self.address = {name: address(number) for number, name in enumerate(self.names)}
        self.reports = {name: self._report(name) for name in self.names}
        self.edges = {
            (a, b): self._edge(a, b)
            for a in self.names
            for b in (self.peers[a] if self.peers is not None else self.names)
            if a != b
        }

    def _report(self, name: str) -> NodeReport:
        own = self.address[name]
        eth0 = Interface(name="eth0", addresses=(f"{own}/16",), mtu_bytes=1500, is_up=True)
        facts = Facts(
            launch=LaunchFacts(
                mode=self.mode, master_addr=self.names[0], master_port=PORT,
                node_rank=self.names.index(name), num_nodes=len(self.names), nproc_per_node=1,
            ),
            host=HostFacts(hostname=name, firewall_tools=self.tools),
            names=NameFacts(
                hostname=name, own=Resolved(name=name, addresses=(own,)),
                master=Resolved(name=self.names[0], addresses=(self.address[self.names[0]],)),
            ),
            interfaces=InterfaceFacts(
                interfaces=(eth0,), gloo=(Choice(interface="eth0", address=own),)
            ),
            ports=PortFacts(range_low=32768, range_high=60999),
        )  # fmt: skip
        return NodeReport(
            node=name, version=9, node_rank=self.names.index(name), stage="done",
            options=self.options, addresses=(own,), facts=facts, delay_p90_ms=0.3,
            listening=Listening(master=PORT, mesh=PORT, ephemeral=RANDOM, udp=40000),
        )  # fmt: skip

    def _edge(self, start: str, end: str) -> EdgeFacts:
        own = self.address[end]
        return EdgeFacts(
            resolved=Resolved(name=end, addresses=(own,)),
            mesh=dial(end, own, PORT),
            master=dial(end, own, PORT) if end == self.names[0] else None,
            ephemeral=tuple(dial(end, own, port) for port in RANDOM),
            source_address=self.address[start],
            rtt=Rtt(num=12, min_ms=0.1, median_ms=0.13, p95_ms=0.3, max_ms=0.4),
            mtu=PathMtu(carried_bytes=1500, interface_bytes=1500, large_ms=1.0),
            datagrams=Datagrams(num_sent=400, num_answered=400),
            bandwidth=Bandwidth(
                mbit_per_s=9000.0, rounds=(9000.0,), num_segments=20000, num_retransmits=1
            ),
            clock=Clock(offset_ms=0.2, uncertainty_ms=0.1),
        )

    def change(self, start: str, end: str, **fields: Any) -> None:
        """Change facts of one path."""
        self.edges[start, end] = msgspec.structs.replace(self.edges[start, end], **fields)

    def facts(self, node: str, **fields: Any) -> None:
        """Change parts of a node's facts."""
        report = self.reports[node]
        facts = msgspec.structs.replace(report.facts, **fields)
        self.reports[node] = msgspec.structs.replace(report, facts=facts)

    def report(self, node: str, **fields: Any) -> None:
        """Change a node's report."""
        self.reports[node] = msgspec.structs.replace(self.reports[node], **fields)

    def close(self, start: str, end: str, outcome: str = "drop", which: str = "all") -> None:
        """Close tcp from `start` to `end`: `all` ports, the `random` ones, or the `master` one."""
        own, edge = self.address[end], self.edges[start, end]
        if which in ("all", "master"):
            failed = dial(end, own, PORT, outcome)
            self.change(start, end, mesh=failed, master=failed if edge.master else None)
        if which in ("all", "random"):
            some = tuple(dial(end, own, port, outcome) for port in RANDOM)
            self.change(start, end, ephemeral=some)
        if which == "all":
            self.change(start, end, rtt=None, mtu=None, datagrams=None, bandwidth=None, clock=None)

    def hole(
        self, start: str, end: str, outcome: str = "drop", first: int = 40000, last: int = 45000,
        **fields: Any,
    ) -> None:  # fmt: skip
        """Close a part of the random ports from `start` to `end`."""
        own = self.address[end]
        bad = [dial(end, own, port, outcome, **fields) for port in GRID if first <= port <= last]
        good = [port for port in GRID if not first <= port <= last]
        self.report(end, listening=msgspec.structs.replace(
            self.reports[end].listening, ephemeral=GRID, shut=39999))  # fmt: skip
        some = tuple(dial(end, own, port) for port in good[:3])
        self.change(start, end, ephemeral=(*bad, *some), ephemeral_ok=tuple(good[3:]))

    def close_inbound(self, end: str, outcome: str = "drop", which: str = "all") -> None:
        for start in self.sources(end):
            self.close(start, end, outcome, which)

    def close_outbound(self, start: str, outcome: str = "drop", which: str = "all") -> None:
        for end in self.targets(start):
            self.close(start, end, outcome, which)

    def sources(self, end: str) -> list[str]:
        return [a for a, b in self.edges if b == end]

    def targets(self, start: str) -> list[str]:
        return [b for a, b in self.edges if a == start]

    def touching(self, node: str) -> list[tuple[str, str]]:
        return [path for path in self.edges if node in path]

    def absent(self, node: str, outcome: str) -> None:
        """Let a node never report; the others see `outcome`."""
        del self.reports[node]
        for start, end in list(self.edges):
            if start == node:
                del self.edges[start, end]
            elif end == node:
                failed = dial(end, self.address[end], PORT, outcome)
                self.edges[start, end] = EdgeFacts(
                    resolved=self.edges[start, end].resolved, mesh=failed
                )

    def hosts_entry(self, holder: str, target: str, wrong: str, outcome: str = "no-arp") -> None:
        """Put `wrong` for `target` into the hosts file of `holder`."""
        resolved = Resolved(name=target, addresses=(wrong,))
        failed = dial(target, wrong, PORT, outcome)
        edge = self.edges[holder, target]
        self.change(
            holder, target, resolved=resolved, mesh=failed, master=failed if edge.master else None
        )
        names = self.reports[holder].facts.names
        assert names is not None
        line = HostsLine(number=3, text=f"{wrong} {target}")
        master = resolved if target == self.names[0] else names.master
        self.facts(holder, names=msgspec.structs.replace(names, hosts_lines=(line,), master=master))

    def slow(self, paths: Iterable[tuple[str, str]], mbit: float, again: float | None) -> None:
        for path in paths:
            self.change(
                *path,
                bandwidth=Bandwidth(
                    mbit_per_s=mbit, rounds=(mbit,), num_segments=300, num_retransmits=1,
                    again_mbit_per_s=-1.0 if again is None else again,
                ),
            )  # fmt: skip

    def believes(
        self, node: str, name: str, where: str = "", answered_by: str = "", outcome: str = ""
    ) -> None:
        """Let a node look for the store at `name`, which it resolves to `where`."""
        where = where or self.address.get(name, name)
        resolved = Resolved(name=name, addresses=(where,))
        outcome = outcome or ("ok" if answered_by else "no-arp")
        called = dial(answered_by, where, PORT, outcome)
        facts = self.reports[node].facts
        assert facts.launch is not None
        assert facts.names is not None
        self.facts(
            node,
            launch=msgspec.structs.replace(facts.launch, master_addr=name),
            names=msgspec.structs.replace(facts.names, master=resolved),
        )
        endpoint = Endpoint(name=name, port=PORT, is_said=True, addresses=(where,), dial=called)
        self.report(node, endpoint=endpoint)

    def told(self, node: str, *names: str) -> None:
        """Give a node a list of nodes."""
        listed = NodeList(num=len(names), digest=",".join(names), names=names, how="--nodes")
        self.report(node, nodes=listed)

    def ranks(self, **numbers: int) -> None:
        """Number the nodes otherwise."""
        for node, number in numbers.items():
            launch = self.reports[node].facts.launch
            assert launch is not None
            self.facts(node, launch=msgspec.structs.replace(launch, node_rank=number))
            self.report(node, node_rank=number)

    def shift_clock(self, node: str, offset_ms: float) -> None:
        for start, end in self.touching(node):
            clock = self.edges[start, end].clock
            assert clock is not None
            more = offset_ms if end == node else -offset_ms
            self.change(
                start, end, clock=msgspec.structs.replace(clock, offset_ms=clock.offset_ms + more)
            )

    def run(self, order: Sequence[str] = ()) -> Run:
        """Put all together."""
        edges: dict[str, dict[str, EdgeFacts]] = {name: {} for name in self.reports}
        for (start, end), edge in self.edges.items():
            if start in edges:
                edges[start][end] = edge
        reports = {
            name: msgspec.structs.replace(self.reports[name], edges=edges[name])
            for name in order or self.reports
            if name in self.reports
        }
        return Run("7f3a", self.names, reports, self.options)


def cluster(num: int, **fields: Any) -> Cluster:
    return Cluster(tuple(f"node{number}" for number in range(num)), **fields)
