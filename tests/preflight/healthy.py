"""Three healthy nodes, and a machine of files: what the tests of facts and checks start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rankscope.preflight.checks.base import Check, Run
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.facts.names import NameFacts
from rankscope.preflight.facts.ports import PortFacts
from rankscope.preflight.links import Link
from rankscope.preflight.model import CheckFinding, Facts, Listening, NodeReport
from rankscope.preflight.options import Options
from rankscope.preflight.system import Resolved, System

NODES = ("node0", "node1", "node2")


def address(node: str) -> str:
    return f"10.77.0.{int(node.removeprefix('node')) + 1}"


def healthy(node: str, nodes: Iterable[str] = NODES) -> NodeReport:
    names, number = tuple(nodes), int(node.removeprefix("node"))
    own = address(node)
    eth0 = Interface(
        name="eth0", addresses=(f"{own}/24",), mtu_bytes=1500, is_up=True, has_carrier=True,
        speed_mbit=10000, duplex="full", carrier_changes=2, num_packets=10**7, rp_filter=0,
    )  # fmt: skip
    lo = Interface(
        name="lo", addresses=("127.0.0.1/8", "::1/128"), mtu_bytes=65536, is_up=True,
        has_carrier=True, is_loopback=True,
    )  # fmt: skip
    chosen = Choice(interface="eth0", address=own, how=f"the host name {node} resolves to {own}")
    dial = Dial(outcome="ok", address="", port=40000, elapsed_ms=0.2)
    return NodeReport(
        node=node,
        node_rank=number,
        stage="done",
        started_unix_s=1_800_000_000.0,
        addresses=(own,),
        listening=Listening(master=29500, mesh=29500, ephemeral=(33000, 45000, 60000)),
        edges={
            peer: EdgeFacts(
                resolved=Resolved(name=peer, addresses=(address(peer),)),
                mesh=msgspec.structs.replace(dial, address=address(peer), port=29500),
                ephemeral=(msgspec.structs.replace(dial, address=address(peer)),),
                source_address=own,
            )
            for peer in names
            if peer != node
        },
        facts=Facts(
            launch=LaunchFacts(
                launcher="torchrun", mode="static", master_addr=names[0], node_rank=number,
                num_nodes=len(names), nproc_per_node=1, read_from=("--node-rank", "--nnodes"),
                environment={"NCCL_DEBUG": "WARN"},
            ),
            host=HostFacts(
                hostname=node, machine_id=f"m{number}", boot_id=f"b{number}", user="ann",
                network_namespace=4026531840, clock_is_synchronised=True, num_cores=8,
            ),
            names=NameFacts(
                hostname=node, own=Resolved(name=node, addresses=(own,), elapsed_ms=0.3),
                master=Resolved(name=names[0], addresses=(address(names[0]),), elapsed_ms=0.3),
                reverse_ms=0.5, reverse_of=own,
            ),
            interfaces=InterfaceFacts(
                interfaces=(lo, eth0), gloo=(chosen,), nccl=(chosen,), gc_thresh3=1024
            ),
            ports=PortFacts(
                range_low=32768, range_high=60999, num_time_wait=3, conntrack_count=10,
                conntrack_max=262144,
            ),
        ),
    )  # fmt: skip


def run(
    change: Mapping[str, Callable[[NodeReport], NodeReport]] | None = None,
    nodes: tuple[str, ...] = NODES,
    options: Options | None = None,
) -> Run:
    """Return a healthy run with some nodes changed; the key "*" changes all of them."""
    changes = dict(change or {})
    reports = {}
    for node in nodes:
        report = healthy(node, nodes)
        for key in ("*", node):
            if key in changes:
                report = changes[key](report)
        reports[node] = report
    return Run("test", nodes, reports, options or Options())


def having(part: str, **fields: Any) -> Callable[[NodeReport], NodeReport]:
    """Return a change of some fields of one part of the facts; part "" is the report itself."""

    def change(report: NodeReport) -> NodeReport:
        if not part:
            return msgspec.structs.replace(report, **fields)
        old = getattr(report.facts, part)
        new = msgspec.structs.replace(old, **fields)
        facts = msgspec.structs.replace(report.facts, **{part: new})
        return msgspec.structs.replace(report, facts=facts)

    return change


def both(*changes: Callable[[NodeReport], NodeReport]) -> Callable[[NodeReport], NodeReport]:
    def change(report: NodeReport) -> NodeReport:
        for one in changes:
            report = one(report)
        return report

    return change


def judged(check: Check, run: Run) -> list[CheckFinding]:
    return list(check.evaluate(run))


@dataclass(frozen=True)
class Recorded(System):
    """A machine made of files under `root`; the resolver and the interfaces are given."""

    answers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interfaces: tuple[Link, ...] = ()
    reverse_ms: float = 0.2

    def resolve(self, name: str, limit_s: float = 3.0) -> Resolved:
        if name in self.answers:
            return Resolved(name=name, addresses=self.answers[name], elapsed_ms=0.1)
        return Resolved(name=name, error="EAI_NONAME: Name or service not known")

    def links(self) -> tuple[Link, ...]:
        return self.interfaces

    def reverse(self, address: str, limit_s: float = 3.0) -> float:
        return self.reverse_ms


def write(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
