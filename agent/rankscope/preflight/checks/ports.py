"""Ports of a node: how many there are, connection tracking, what earlier jobs left."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, on_each
from rankscope.preflight.checks.pairs import shortened
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.facts.processes import Leftover
from rankscope.preflight.model import CheckFinding, Fix, NodeReport

# connections of one rank to one other: gloo has one in each process group (default, and some
# of meshes), NCCL's sockets up to 8 a channel, for the peers in its rings and trees only
_PER_PAIR = 4
_WIDE = 30_000  # ports of a range: to widen it gives few more
_PORTS_RATIO = 0.5  # other programs need ports, too, and closed ones wait for a minute


_WIDER = "sudo sysctl -w net.ipv4.ip_local_port_range='30000 65535'"


class PortLocal(BuiltinCheck, id="port.local", scope="pair", needs=("peers",)):
    """Each node has local ports left for the calls that it makes."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where all calls to the random ports of a peer found none; warn where some did."""
        for report in run.present:
            failed = {peer: some for peer, edge in report.edges.items() if (some := _unsent(edge))}
            if failed:
                yield self._finding(run, report, failed)

    def _finding(
        self, run: Run, report: NodeReport, failed: dict[str, tuple[Dial, ...]]
    ) -> CheckFinding:
        is_full = any(
            all(dial.outcome == "no-local-port" for dial in report.edges[peer].ephemeral)
            for peer in failed
        )
        facts = report.facts.ports
        low, high = (facts.range_low, facts.range_high) if facts is not None else (0, 0)
        fixes = [Fix(node=report.node, command="sudo ss -tanp   # who holds them", owner="admin")]
        if high - low < _WIDE:
            fixes.append(Fix(node=report.node, command=_WIDER, owner="admin"))
        of_range = f" of {low}-{high}" if high else ""
        return self.finding(
            "fail" if is_full else "warn",
            f"no local port{of_range} was left for {'its' if is_full else 'some of its'} calls",
            at=(report.node,),
            edges=((report.node, peer) for peer in failed),
            evidence={
                "class": "no-local-port",
                "errno": "EADDRNOTAVAIL",
                "num_failed": sum(map(len, failed.values())),
                "range_low": low,
                "range_high": high,
                "num_time_wait": facts.num_time_wait if facts is not None else -1,
            },
            lines=shortened(
                f"{report.node}->{peer}  {len(some)} calls ended with EADDRNOTAVAIL"
                for peer, some in failed.items()
            ),
            fix=fixes,
            impact="'Cannot assign requested address' on that node, the others wait for it",
            unless="the program that holds them ends before the job begins",
        )


def _unsent(edge: EdgeFacts) -> tuple[Dial, ...]:
    """Return the calls for which there was no local port."""
    dials = (edge.mesh, edge.master, *edge.others, *edge.ephemeral)
    return tuple(dial for dial in dials if dial is not None and dial.outcome == "no-local-port")


class PortCount(BuiltinCheck, id="port.count", needs=("peers",)):
    """The range of ephemeral ports is wide enough for the connections of all ranks."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where they would fill half of it."""
        yield from self.not_measured(run, "ports")
        world = sum(run.nproc(node) for node in run.expected)
        tight: dict[tuple[int, int, int], list[str]] = {}
        for node, facts in run.each(lambda facts: facts.ports).items():
            if not facts.range_high:
                continue
            nproc = run.nproc(node)
            needed = _PER_PAIR * nproc * (world - nproc) + max(0, facts.num_time_wait)
            size = facts.range_high - facts.range_low + 1
            if needed > _PORTS_RATIO * size:
                key = (needed, size, max(0, facts.num_time_wait))
                tight.setdefault(key, []).append(node)
        for (needed, size, waiting), nodes in tight.items():
            yield self.warn(
                f"about {needed} ports needed, the range has {size}",
                at=nodes,
                evidence={"num_needed": needed, "num_ports": size, "num_time_wait": waiting},
                fix=(Fix(command=_WIDER, owner="admin"),),
                impact="'Cannot assign requested address' while process groups are made",
                unless="the job makes few process groups",
                confidence="likely",
            )


_CONNTRACK_RATIO = 0.8


class PortConntrack(BuiltinCheck, id="port.conntrack"):
    """The table in which the firewall follows connections is at most 80 % full."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where new connections will soon be dropped."""
        yield from self.not_measured(run, "ports")
        without = []
        for node, facts in run.each(lambda facts: facts.ports).items():
            if facts.conntrack_max <= 0 or facts.conntrack_count < 0:
                without.append(node)
            elif facts.conntrack_count > _CONNTRACK_RATIO * facts.conntrack_max:
                count, room = facts.conntrack_count, facts.conntrack_max
                command = f"sudo sysctl -w net.netfilter.nf_conntrack_max={4 * room}"
                yield self.warn(
                    f"{count} of {room} tracked connections are in use",
                    at=(node,),
                    evidence={"num_tracked": count, "num_max": room},
                    fix=on_each((node,), command, "admin"),
                    impact="'nf_conntrack: table full, dropping packet': connections time out "
                    "by chance",
                    unless="the rules do not track the ports of this job",
                )
        title = "no table of connections to be seen (nf_conntrack)"
        yield from self.note("skipped", without, title)


class ProcLeftover(BuiltinCheck, id="proc.leftover"):
    """No training process of yours is older than this job and still holds a port or a GPU."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn once for each node that has some."""
        yield from self.not_measured(run, "ports")
        for node, facts in run.each(lambda facts: facts.ports).items():
            # who holds MASTER_PORT is port.master.free's
            holder = facts.master_busy.pid if facts.master_busy else 0
            left = [process for process in facts.leftovers if process.pid != holder]
            if left:
                yield self._finding(node, left)

    def _finding(self, node: str, left: list[Leftover]) -> CheckFinding:
        first = left[0]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        command = "kill " + " ".join(str(process.pid) for process in left[:16])
        return self.warn(
            f"pid {first.pid} {first.command[:60]}{more} of an earlier job "
            f"still holds {_holds(first)}",
            at=(node,),
            evidence={"processes": [_evidence(process) for process in left[:16]]},
            lines=(
                f"pid {p.pid}, {p.age_s / 60:.0f} min old, {_holds(p)}: {p.command[:80]}"
                for p in left[:4]
            ),
            fix=on_each((node,), command),
            impact="less GPU memory than you think, or EADDRINUSE when ports are asked for",
            unless="another job of yours is meant to run on this machine",
            confidence="likely",
        )


def _holds(process: Leftover) -> str:
    parts = []
    if process.ports:
        parts.append("port " + ", ".join(map(str, process.ports[:4])))
    if process.gpus:
        parts.append("GPU " + ", ".join(map(str, process.gpus)))
    return " and ".join(parts)


def _evidence(process: Leftover) -> dict[str, object]:
    return {
        "pid": process.pid,
        "age_s": round(process.age_s, 1),
        "ports": list(process.ports),
        "gpus": list(process.gpus),
    }
