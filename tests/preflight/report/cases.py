"""Answers to be shown: what stands in golden/*.json was written by `python -m` of this file.

PYTHONPATH=agent:. python tests/preflight/report/cases.py          # the JSON files
RANKSCOPE_GOLDEN=write python -m pytest tests/preflight/report     # the screens beside them
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts, PathMtu
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.model import (
    CheckFinding,
    Facts,
    Fix,
    LaunchVerdict,
    NodeReport,
    Result,
    Status,
)
from rankscope.preflight.report import stored
from rankscope.preflight.report.summary import summarise

GOLDEN = Path(__file__).with_name("golden")
_CHECKS: dict[str, tuple[str, ...]] = {
    "launch": ("node.absent", "env.complete", "env.agree", "env.rank.unique"),
    "names": ("dns.master", "dns.loopback", "dns.wrong"),
    "interfaces": ("net.iface.gloo", "net.iface.missing"),
    "ports": ("port.master.free", "port.master.reach", "port.ephemeral", "port.oneway"),
    "paths": ("net.mtu.path", "net.latency", "net.bandwidth"),
    "clock": ("clock.offset", "clock.sync"),
    "limits": ("lim.nofile", "lim.memlock", "lim.shm"),
    "storage": ("fs.free", "fs.hang"),
    "software": ("sw.drift",),
    "gpu": ("gpu.count", "gpu.busy", "gpu.ecc"),
    "rdma": ("ib.port", "ib.gid"),
    "collective": ("coll.rdzv", "coll.gloo"),
}
Pair = tuple[str, str]


def results(findings: Iterable[CheckFinding], folded: Iterable[str] = ()) -> tuple[Result, ...]:
    """Return one result per check: those of `findings`, and ok or skipped for the others."""
    said: dict[str, CheckFinding] = {finding.id: finding for finding in findings}
    rows = []
    for family, ids in _CHECKS.items():
        for id in ids:
            status: Status = "ok"
            reason = ""
            if family in ("gpu", "rdma"):
                status = "skipped"
                reason = {"gpu": "no GPU on any node"}.get(
                    family, "no InfiniBand or RoCE port on any node"
                )
            if id in said:
                status = said[id].status
                reason = said[id].title if status in ("unknown", "skipped") else ""
            if id in folded:
                status = "fail"
            rows.append(Result(id=id, family=family, status=status, reason=reason, elapsed_ms=0.2))
    return tuple(rows)


def edge(outcome: DialClass = "ok", large_ok: bool = True) -> EdgeFacts:
    dial = Dial(outcome="ok", address="10.77.0.2", port=29500, elapsed_ms=0.4)
    late = Dial(outcome=outcome, address="10.77.0.2", port=40321, elapsed_ms=1500.0)
    return EdgeFacts(
        mesh=dial, ephemeral=(late,), mtu=PathMtu(carried_bytes=9000, large_ok=large_ok)
    )


def reports(
    names: Iterable[str], bad: dict[Pair, EdgeFacts] | None = None, silent: Iterable[str] = ()
) -> dict[str, NodeReport]:
    """Return a report of each node with a path to all others."""
    names, bad, away = list(names), bad or {}, set(silent)
    launch = LaunchFacts(launcher="torchrun", mode="env", num_nodes=len(names), nproc_per_node=1)
    return {
        name: NodeReport(
            node=name,
            node_rank=rank,
            version=9,
            stage="done",
            facts=Facts(launch=launch),
            edges={
                peer: bad.get((name, peer), edge()) for peer in names if peer not in (name, *away)
            },
        )
        for rank, name in enumerate(names)
        if name not in away
    }


def verdict(run: Run, findings: tuple[CheckFinding, ...] = (), **more: object) -> LaunchVerdict:
    loud = tuple(finding for finding in findings if finding.status in ("fail", "warn"))
    quiet = tuple(finding for finding in findings if finding not in loud)
    folded = [text.partition(":")[0] for finding in loud for text in finding.explains]
    fields: dict[str, object] = {
        "run_id": run.run_id,
        "expected": run.expected,
        "reported": tuple(report.node for report in run.present),
        "findings": loud,
        "notes": quiet,
        "results": results(findings, folded),
        "is_partial": bool(run.absent),
        "elapsed_ms": 4730.0,
        **more,
    }
    return LaunchVerdict(**fields)  # type: ignore[arg-type]


THREE = ("node0", "node1", "node2")


def green() -> tuple[LaunchVerdict, Run]:
    run = Run("7f3a", THREE, reports(THREE))
    return verdict(run), run


PORTS = CheckFinding(
    id="port.ephemeral",
    status="fail",
    title="node1 drops random ports; only 29500 is open",
    nodes=("node1",),
    edges=(("node0", "node1"), ("node2", "node1")),
    lines=(
        "node0->node1 drop after 1.5 s, node2->node1 drop after 1.5 s",
        "the listener on node1 was up: it says so itself; 3 ports tried in 32768-60999",
    ),
    impact="gloo init: ranks 1 and 2 fail after 9.5 min, rank 0 hangs for more than 30 min",
    fix=(
        Fix(
            node="node1",
            owner="admin",
            command="sudo ufw allow from 10.77.0.0/24 to any port 32768:60999 proto tcp",
        ),
    ),
    explains=("port.oneway: node1 can dial node0, node0 cannot dial node1",),
    unless="the agent on node1 was stopped while the others dialled",
)
MTU = CheckFinding(
    id="net.mtu.path",
    status="fail",
    title="paths of node2 carry 1500 bytes, its interface eth0 says 9000: large messages vanish",
    nodes=("node2",),
    edges=(("node0", "node2"), ("node2", "node0")),
    lines=("64 kB from node0 to node2 were not echoed in 2.0 s, 64 B were",),
    impact="init and small all-reduces pass, then 30 min of silence",
    fix=(Fix(node="node2", owner="admin", command="sudo ip link set eth0 mtu 1500"),),
)
NOFILE = CheckFinding(
    id="lim.nofile",
    status="warn",
    title="node1: 1024 open files allowed, 4096 wanted",
    nodes=("node1",),
    fix=(Fix(node="node1", command="ulimit -n 65536"),),
    confidence="likely",
)
HANG = CheckFinding(id="fs.hang", status="unknown", title="node2: stat of /nfs did not end in 3 s")


def red() -> tuple[LaunchVerdict, Run]:
    bad = {
        ("node0", "node1"): edge("drop"),
        ("node2", "node1"): edge("drop"),
        ("node0", "node2"): edge(large_ok=False),
        ("node2", "node0"): edge(large_ok=False),
    }
    run = Run("7f3a", THREE, reports(THREE, bad))
    return verdict(run, (NOFILE, PORTS, MTU, HANG)), run


def absent() -> tuple[LaunchVerdict, Run]:
    run = Run("7f3a", THREE, reports(THREE, silent=("node1", "node2")))
    found = CheckFinding(
        id="node.absent",
        status="fail",
        title="node1, node2: no report",
        nodes=("node1", "node2"),
        lines=("from node0: no answer within 1.5 s on port 29500: host down, or a firewall drops",),
        fix=tuple(
            Fix(node=name, command="rankscope preflight --nodes node0,node1,node2")
            for name in ("node1", "node2")
        ),
        confidence="likely",
    )
    return verdict(run, (found,), elapsed_ms=14100.0), run


def warned() -> tuple[LaunchVerdict, Run]:
    run = Run("7f3a", THREE, reports(THREE))
    return verdict(run, (NOFILE,)), run


def hostile() -> tuple[LaunchVerdict, Run]:
    """Names and texts that would be markup, move the cursor, end a line, or turn the text."""
    names = ("[red]node[/red]", "node\x1b[2J1", "n" * 300, "gpu-\u202e7-\u200b8", "node<b>\n4&\x00")
    run = Run("[bold]\x1b]0;owned\x07", names, reports(names, {(names[0], names[1]): edge("drop")}))
    bad = CheckFinding(
        id="port.ephemeral",
        status="fail",
        title=f"{names[0]} [/bold] \x1b[31m {names[2]} 名前 drops\r\nFAIL 9 forged line",
        nodes=names[:3],
        edges=((names[0], names[1]),),
        lines=("\x9b31m banner: ]]> <script>alert(1)</script> \udcff", "x" * 2000),
        impact="[link=http://evil]click[/link]",
        fix=(
            Fix(node=names[1], command="sudo nft -f - <<'E'\n\ttable inet [x] {\n\t}\nE\x1b[A"),
            Fix(node=names[2], owner="admin", command="ip link set " + "y" * 200),
        ),
        explains=("port.oneway: [blink]\x07",),
    )
    odd = CheckFinding(id="fs.hang", status="unknown", title="\x1b[1A[red]\n\nno answer")
    return verdict(run, (bad, odd), coverage="tested [3] % of\x1b[0m pairs"), run


def one_way_pair() -> tuple[LaunchVerdict, Run]:
    """One bad path of one pair: nobody is blamed."""
    run = Run("7f3a", THREE, reports(THREE, {("node2", "node1"): edge("refused")}))
    found = CheckFinding(
        id="port.oneway",
        status="fail",
        title="node2 cannot dial node1 on random ports, node1 can dial node2",
        edges=(("node2", "node1"),),
        lines=("node2->node1 refused after 0.6 ms at 10.77.0.2:40321; the listener was up",),
        impact="works today with gloo only if node1 has the higher address",
        fix=(Fix(node="node1", owner="admin", command="sudo ufw allow from 10.77.0.3 proto tcp"),),
    )
    return verdict(run, (found,)), run


def many(num_nodes: int = 1000, num_bad: int = 300) -> tuple[LaunchVerdict, Run]:
    """Every bad node with a finding of its own, and a firewall before some of them."""
    names = tuple(f"gpu{number:04d}" for number in range(num_nodes))
    bad = names[:: max(1, num_nodes // num_bad)][:num_bad]
    launch = LaunchFacts(launcher="slurm", mode="static", num_nodes=num_nodes)
    made = {}
    for rank, name in enumerate(names):
        peers = [names[(rank + step) % num_nodes] for step in range(1, 33)]
        edges = {peer: edge("drop" if peer in bad[:40] else "ok") for peer in peers}
        made[name] = NodeReport(
            node=name, node_rank=rank, stage="done", facts=Facts(launch=launch), edges=edges
        )
    run = Run("4711", names, made)
    findings = []
    for number, name in enumerate(bad):
        kind = ("port.ephemeral", "lim.nofile", "fs.free")[number % 3]
        status: Status = "warn" if kind == "lim.nofile" else "fail"
        fix = Fix(node=name, owner="admin", command=f"sudo ufw allow from 10.0.0.0/16 # {name}")
        findings.append(
            CheckFinding(
                id=kind,
                status=status,
                title=f"{name}: something of it is wrong by {number} units",
                nodes=(name,),
                lines=("one side says this", "the other side says that"),
                impact="the launch would have hung for 30 min",
                fix=(fix,),
            )
        )
    return verdict(run, tuple(findings), coverage="tested 3 % of pairs", elapsed_ms=41e3), run


STORED = {
    "green": green,
    "red": red,
    "absent": absent,
    "warned": warned,
    "hostile": hostile,
    "one_way_pair": one_way_pair,
}

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, make in STORED.items():
        (GOLDEN / f"{name}.json").write_bytes(stored.encode(summarise(*make())))
