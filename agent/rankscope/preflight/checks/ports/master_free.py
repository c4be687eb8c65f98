"""port.master.free: nothing else listens on MASTER_PORT at the master."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import not_measured
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.facts.ports import PortOwner
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier

_PRIVILEGED = 1024  # ip_unprivileged_port_start, as Linux sets it
_WOULD: dict[Mode, str] = {
    "static": "node 0 ends with EADDRINUSE; the others hang without output, for more than 30 min",
    "c10d": "nothing on any node for more than 30 min",
    "env": "rank 0 ends with EADDRINUSE; the others wait 30 min",
}


class PortMasterFree:
    """MASTER_PORT can be bound at the master."""

    id: ClassVar[str] = "port.master.free"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where another process holds it, with the process."""
        report = run.reports.get(run.master)
        if report is None:
            title = f"the master, {run.master or 'whoever it is'}, has not reported"
            yield Finding(id=self.id, status="unknown", title=title)
            return
        facts = report.facts.ports
        if facts is None:
            yield from (f for f in not_measured(self.id, run, "ports") if run.master in f.nodes)
            return
        owner = facts.master_busy
        if owner is None:
            yield from _not_bound(run, report)
            return
        if owner.is_launcher:
            title = f"{owner.command.partition(' ')[0]} of this launch holds port {owner.port}"
            yield Finding(id=self.id, status="skipped", nodes=(run.master,), title=title)
            return
        yield self._finding(run, report, owner)

    def _finding(self, run: Run, report: NodeReport, owner: PortOwner) -> Finding:
        return Finding(
            id=self.id,
            status="fail",
            nodes=(run.master,),
            title=f"{run.master}: port {owner.port} is held by {_who(report, owner)}",
            evidence={
                "port": owner.port,
                "pid": owner.pid,
                "command": owner.command,
                "user": owner.user,
                "age_s": round(owner.age_s, 1),
            },
            told=(f"ss -ltnp 'sport = :{owner.port}' on {run.master} shows it, too",),
            fix=tuple(_fixes(run, report, owner)),
            would=_WOULD[run.mode],
        )


def _not_bound(run: Run, report: NodeReport) -> Iterator[Finding]:
    """Tell of a port that could not be bound though nobody listens on it."""
    is_root = report.facts.host is not None and report.facts.host.is_root
    if not report.listening.mesh or report.listening.master:
        return  # it was bound, or nothing was: this preflight has no listeners
    port = run.master_port
    title = f"{run.master}: port {port} could not be bound, and nobody is seen to listen on it"
    if port < _PRIVILEGED and not is_root:
        title = f"{run.master}: ports below {_PRIVILEGED}, like {port}, are for root alone"
        fix = Fix(command="torchrun --master-port 29500 ...")
        yield Finding(
            id=PortMasterFree.id, status="fail", nodes=(run.master,), title=title,
            evidence={"port": port}, fix=(fix,), would="node 0 ends with EACCES; the others wait",
            wrong_if="net.ipv4.ip_unprivileged_port_start is lower", confidence="likely",
        )  # fmt: skip
    else:
        yield Finding(id=PortMasterFree.id, status="unknown", nodes=(run.master,), title=title)


def _who(report: NodeReport, owner: PortOwner) -> str:
    me = report.facts.host.user if report.facts.host is not None else ""
    if not owner.pid:
        return f"a process of {owner.user or 'another user'}, which cannot be seen from here"
    whose = "you" if owner.user and owner.user == me else owner.user or "another user"
    since = ""
    if owner.age_s > 0 and report.started_unix_s > 0:
        # the node's own wall clock; its date where it is another day
        began = time.gmtime(report.started_unix_s - owner.age_s)
        form = "%H:%M UTC" if owner.age_s < 86400 else "%Y-%m-%d %H:%M UTC"
        since = f", since {time.strftime(form, began)}"
    return f"pid {owner.pid} {owner.command} ({whose}{since})"


def _fixes(run: Run, report: NodeReport, owner: PortOwner) -> Iterator[Fix]:
    me = report.facts.host.user if report.facts.host is not None else ""
    if owner.pid and owner.user == me:
        yield Fix(node=run.master, command=f"kill {owner.pid}  # {shlex.quote(owner.command)[:60]}")
    elif owner.pid:
        yield Fix(node=run.master, command=f"sudo kill {owner.pid}", owner="admin")
    other = owner.port + 1 if owner.port < 65535 else owner.port - 1
    option = "--rdzv-endpoint" if run.mode == "c10d" else "--master-port"
    if run.mode == "env":
        yield Fix(command=f"export MASTER_PORT={other}")
    elif run.mode == "c10d":
        yield Fix(command=f"torchrun {option} {run.master}:{other} ...")
    else:
        yield Fix(command=f"torchrun {option} {other} ...")
