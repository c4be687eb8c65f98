"""Preflights that a server keeps: one with a failure, and a good one of the day before."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import msgspec

from rankscope.preflight.facts.edges import Bandwidth, Dial, EdgeFacts, Rtt
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.model import CheckFinding, Facts, Fix, LaunchVerdict, NodeReport, Result

BAD, GOOD = "of-today", "of-yesterday"
NODES = ("peer-a", "peer-b", "peer-c")
COMMAND = "sudo ufw prepend allow from 10.0.0.0/24 to any port 29500 proto tcp"
CLOSED = CheckFinding(
    id="port.master.reach", status="fail", title="peer-b cannot reach peer-a:29500",
    nodes=("peer-a",), edges=(("peer-b", "peer-a"),), lines=("peer-b->peer-a drop after 1.5 s",),
    fix=(
        Fix(node="peer-a", command=COMMAND, owner="admin"),
        Fix(node="peer-a", command="# ask who runs the switch", owner="provider"),
    ),
    impact="the others wait 15 min, then end", unless="the firewall was being changed",
)  # fmt: skip
LONG = CheckFinding(
    id="lim.nofile", status="warn", title="peer-c: 1024 files", nodes=("peer-c",),
    fix=(Fix(node="peer-c", command="ulimit -n 65536 && " + "echo long; " * 200),),
)  # fmt: skip
RESULTS = (
    Result(id="port.master.free", family="ports", status="ok"),
    Result(id="port.master.reach", family="ports", status="fail"),
    Result(id="lim.nofile", family="limits", status="warn"),
    Result(id="gpu.ecc", family="gpu", status="skipped", reason="no GPU on any node"),
    Result(id="net.loss", family="paths", status="unknown", reason="peer-c was too busy"),
    Result(id="net.routes", family="paths", status="ok"),
)


def edge(outcome: Any = "ok", mbit: float | None = 9000.0) -> EdgeFacts:
    return EdgeFacts(
        mesh=Dial(outcome=outcome, address="10.0.0.1", port=29500, elapsed_ms=1.0),
        rtt=Rtt(num=20, min_ms=0.2, median_ms=0.3, p95_ms=0.4, max_ms=0.5),
        bandwidth=None if mbit is None else Bandwidth(mbit_per_s=mbit),
    )


def put(
    server: str, run: str, id: str, began: float, verdict: LaunchVerdict, **paths: EdgeFacts
) -> None:
    reports = [
        NodeReport(
            node=node, version=3, node_rank=rank, stage="done", started_unix_s=began,
            facts=Facts(host=HostFacts(hostname=f"{node}.cluster")), addresses=(f"10.0.0.{rank}",),
            edges={
                peer: paths.get(f"{node}_{peer}".replace("-", "_"), edge())
                for peer in NODES if peer != node
            },
        )
        for rank, node in enumerate(NODES)
    ]  # fmt: skip
    body = msgspec.json.encode({"verdict": verdict, "reports": reports, "run_id": run})
    url = f"{server}/api/v1/preflight/runs/{id}"
    request = urllib.request.Request(url, body, method="PUT")
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert reply.status == 200


def keep_two(server: str, run: str) -> None:
    """Send both to a server, as preflights of this run."""
    given: Any = {"run_id": "x", "expected": NODES, "reported": NODES}
    now, passed = time.time(), RESULTS[:1]
    good = LaunchVerdict(**given, findings=(), results=passed)
    put(server, run, GOOD, now - 86_400, good)
    bad = LaunchVerdict(**given, findings=(LONG, CLOSED), results=RESULTS)
    slow, unknown = edge(mbit=700.0), edge(mbit=None)
    put(
        server, run, BAD, now - 60, bad, peer_b_peer_a=edge("drop", None), peer_a_peer_c=slow,
        peer_c_peer_b=unknown,
    )  # fmt: skip
