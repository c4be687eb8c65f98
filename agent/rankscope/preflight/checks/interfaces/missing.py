"""net.iface.missing: the interfaces that variables name are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.interfaces.real import best_interface, is_real
from rankscope.preflight.facts.choice import matches, nccl_settings
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Status, Tier

GLOO, NCCL, HCA = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"


class NetIfaceMissing:
    """GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and NCCL_IB_HCA name what every node has."""

    id: ClassVar[str] = "net.iface.missing"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the backend in use is told a name that is not there; else warn."""
        yield from not_measured(self.id, run, "interfaces")
        by_cause: dict[tuple[str, str, str], list[str]] = {}
        for report in run.present:
            for cause in _faults(report):
                by_cause.setdefault(cause, []).append(report.node)
        for (variable, value, problem), nodes in by_cause.items():
            used = (variable == GLOO) == (run.backend == "gloo")
            status: Status = "fail" if used else "warn"
            there = {node: _names(run, node) for node in nodes}
            yield Finding(
                id=self.id,
                status=status,
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {variable}={value}, but {problem}",
                evidence={"variable": variable, "value": value, "interfaces": there},
                told=tuple(f"{node} has {', '.join(there[node])}" for node in nodes[:4]),
                fix=tuple(_fixes(run, variable, nodes)),
                would=_would(variable),
                wrong_if="" if used else f"the job runs with {run.backend} alone",
            )


def _faults(report: NodeReport) -> Iterator[tuple[str, str, str]]:
    """Yield (variable, value, what is wrong)."""
    facts, launch = report.facts.interfaces, report.facts.launch
    if facts is None:
        return
    for choice in facts.gloo:
        if choice.problem and choice.how.startswith(f"{GLOO}=") and not choice.address:
            if "has no address" not in choice.problem:
                yield GLOO, choice.how.partition("=")[2], choice.problem
    for choice in facts.nccl:
        if choice.problem and choice.how.startswith(f"{NCCL}="):
            yield NCCL, choice.how.partition("=")[2], choice.problem
    rdma = report.facts.rdma
    if launch is None or rdma is None or not rdma.ports:
        return
    hca = nccl_settings(launch.environment, launch.conf_files).get(HCA, "")
    devices = {port.device for port in rdma.ports}
    if hca and not any(matches(device, hca) for device in devices):
        yield HCA, hca, f"the devices are {', '.join(sorted(devices))}"


def _names(run: Run, node: str) -> list[str]:
    facts = run.reports[node].facts.interfaces
    return [row.name for row in facts.interfaces] if facts is not None else []


def _fixes(run: Run, variable: str, nodes: list[str]) -> Iterator[Fix]:
    """Yield names that are there: one for all nodes if there is one, else each node's own."""
    if variable == HCA:
        yield from (Fix(node=node, command=f"unset {HCA}") for node in nodes)
        return
    sign = "==" if variable == NCCL else "="
    everywhere = [
        {row.name for row in r.facts.interfaces.interfaces if is_real(row)}
        for r in run.present
        if r.facts.interfaces is not None
    ]
    common = set.intersection(*everywhere) if everywhere else set()
    for node in nodes:
        best = best_interface(run, node)
        if best and best in common:
            yield Fix(command=f"export {variable}{sign}{best}")
            return
    for node in nodes:
        best = best_interface(run, node)
        if best:
            yield Fix(node=node, command=f"export {variable}{sign}{best}")


def _would(variable: str) -> str:
    if variable == GLOO:
        return "that node fails at once: 'Unable to find address for'; the others wait 30 min"
    if variable == NCCL:
        return "NCCL init fails on that node: 'no socket interface found'; the others hang"
    return "NCCL finds no such device and falls back to sockets, many times slower, or fails"
