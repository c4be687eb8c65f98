"""The variables of a launch: drift between nodes, typing mistakes, what was left from debugging."""

from __future__ import annotations

import difflib
import functools
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, on_each
from rankscope.preflight.checks.comparing import compared, odd_ones
from rankscope.preflight.model import CheckFinding, Fix, NodeReport, Status

UNSET = "(not set)"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# these choose a protocol that both ends must speak: where they differ, NCCL hangs or aborts
_MUST_AGREE = ("NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_FAMILY", "NCCL_IB_DISABLE")
# differ between ranks or nodes by design; names of interfaces are for net.iface.*
_OWN = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|NCCL_HOSTID|NCCL_COMM_ID|"
    r"NCCL_IB_HCA|.*_SOCKET_IFNAME|.*_(FILE|DIR|PATH|CPUSET|PREFIX)|.*RANK.*"
)


class EnvDrift(BuiltinCheck, id="env.drift", scope="all", needs=("peers",)):
    """NCCL_*, GLOO_*, TORCH_*, CUDA_*, OMP_* and NCCL's files are the same on all nodes."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on different values; fail on those that both ends must share."""
        launches = run.launches
        names = {name for launch in launches.values() for name in launch.environment}
        paths = {path for launch in launches.values() for path in launch.conf_files}
        rows = {
            name: {node: launch.environment.get(name, UNSET) for node, launch in launches.items()}
            for name in sorted(names)
            if not _OWN.fullmatch(name) and not _has_own_check(run, name)
        }
        for path in sorted(paths):
            rows[path] = {n: launch.conf_files.get(path, UNSET) for n, launch in launches.items()}
        groups: dict[tuple[Status, tuple[str, ...]], list[str]] = defaultdict(list)
        for name, values in rows.items():
            if odd := odd_ones(values):
                must = name in _MUST_AGREE and run.backend == "nccl"
                groups["fail" if must else "warn", odd].append(name)
        for (status, nodes), drifted in groups.items():
            yield self._finding(status, nodes, {name: rows[name] for name in drifted})

    def _finding(
        self, status: Status, nodes: tuple[str, ...], rows: dict[str, dict[str, str]]
    ) -> CheckFinding:
        name, values = next(iter(rows.items()))
        more = f" and {len(rows) - 1} more differ" if len(rows) > 1 else " differs"
        usual = {n: v for n, v in values.items() if n not in nodes}
        said = ""
        if usual:
            said = f" ({_short(values[nodes[0]])}, elsewhere {_short(next(iter(usual.values())))})"
        return self.finding(
            status,
            f"{name}{more}{said}",
            at=nodes,
            evidence={"variables": rows},
            lines=(f"{name} = {line}" for name, v in list(rows.items())[:6] for line in _lines(v)),
            fix=_drift_fixes(nodes, rows),
            impact="NCCL hangs at the first collective, or aborts"
            if status == "fail"
            else "nodes behave differently: another speed, another path, another amount of output",
            unless="the launcher or the script sets it for all ranks later",
        )


def _has_own_check(run: Run, name: str) -> bool:
    """Return whether a check of its own speaks of this variable: one cause, one finding."""
    if closest(name):
        return True  # env.unknown
    if name == "OMP_NUM_THREADS":
        return any(_excess(run, report) is not None for report in run.present)
    if name == "NCCL_IB_GID_INDEX":
        return any(_has_rdma(report) for report in run.present)
    return any(
        name == row and is_slow(launch.environment.get(name, "")) and applies(run.reports[node])
        for row, is_slow, applies, _ in _ROWS
        for node, launch in run.launches.items()
    )


def _short(value: str) -> str:
    line = value.strip().partition("\n")[0]
    return line if len(line) <= 40 else f"{line[:37]}..."


def _lines(values: dict[str, str]) -> tuple[str, ...]:
    return compared({node: _short(value) for node, value in values.items()})


def _drift_fixes(nodes: tuple[str, ...], rows: dict[str, dict[str, str]]) -> Iterator[Fix]:
    """Yield what makes the odd nodes say what the others say."""
    for name, values in rows.items():
        usual = [value for node, value in values.items() if node not in nodes]
        if not usual or not _NAME.fullmatch(name) or not usual[0].isprintable():
            continue  # a file, or nothing that a shell would take on one line
        value = shlex.quote(usual[0])
        command = f"unset {name}" if usual[0] == UNSET else f"export {name}={value}"
        for node in nodes:
            yield Fix(node=node, command=command)


_PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
_LIST = Path(__file__).with_name("known_variables.txt")
# SequenceMatcher ratio: one letter of 18 is 0.97, IFACE for IFNAME 0.89, other variables below
_CLOSE = 0.88


class EnvUnknown(BuiltinCheck, id="env.unknown"):
    """Every NCCL_, TORCH_ and GLOO_ variable is one that is read, not one letter off."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on names that are close to a known one and are none."""
        nodes_of = grouped(
            (name, node)
            for node, launch in run.launches.items()
            for name in launch.environment
            if name.startswith(_PREFIXES)
        )
        for name, nodes in sorted(nodes_of.items()):
            meant = closest(name)
            if not meant or not _NAME.fullmatch(name):
                continue
            value = run.launches[nodes[0]].environment[name]
            yield self.warn(
                f"nothing reads {name}; did you mean {meant}?",
                at=nodes,
                evidence={"name": name, "variable": name, "meant": meant, "value": value},
                fix=(Fix(command=f"unset {name}; export {meant}={shlex.quote(value)}"),)
                if value.isprintable()
                else (Fix(command=f"unset {name}"),),
                impact=f"{name} is ignored without a word",
                unless="a plugin of your site, or a newer NCCL or torch, reads it",
                confidence="likely",
            )


def closest(name: str) -> str:
    """Return the known name that `name` nearly is; "" if it is known, or near to none."""
    known = known_variables()
    if name in known:
        return ""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_CLOSE)
    return found[0] if found else ""


@functools.cache
def known_variables() -> frozenset[str]:
    """Return all names of the list beside this file."""
    lines = (line.partition("#")[0].strip() for line in _LIST.read_text().splitlines())
    return frozenset(line for line in lines if line)


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _has_gpus(report: NodeReport, at_least: int = 1) -> bool:
    return report.facts.gpu is not None and report.facts.gpu.num_gpus >= at_least


def _has_rdma(report: NodeReport) -> bool:
    return report.facts.rdma is not None and bool(report.facts.rdma.ports)


_Row = tuple[str, Callable[[str], bool], Callable[[NodeReport], bool], str]
_ROWS: tuple[_Row, ...] = (
    ("NCCL_DEBUG", lambda v: v.upper() == "TRACE", _has_gpus, "NCCL writes a line per operation"),
    ("TORCH_DISTRIBUTED_DEBUG", lambda v: v.upper() == "DETAIL", lambda _: True,
     "every collective is preceded by one that compares it on all ranks"),
    ("CUDA_LAUNCH_BLOCKING", _is_on, _has_gpus, "each kernel is waited for"),
    ("NCCL_P2P_DISABLE", _is_on, lambda r: _has_gpus(r, 2), "GPUs do not use NVLink or PCIe"),
    ("NCCL_SHM_DISABLE", _is_on, lambda r: _has_gpus(r, 2), "ranks of a node use the network"),
    ("NCCL_IB_DISABLE", _is_on, _has_rdma, "InfiniBand and RoCE are there, and are not used"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, _has_gpus, "each tensor costs a cudaMalloc"),
)  # fmt: skip


class EnvSlowLeft(BuiltinCheck, id="env.slow_left"):
    """No variable is left over from debugging that makes every step slower."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on those that do something on that node."""
        for name, is_slow, applies, why in _ROWS:
            nodes = {
                node: launch.environment[name]
                for node, launch in run.launches.items()
                if is_slow(launch.environment.get(name, "")) and applies(run.reports[node])
            }
            if nodes:
                value = next(iter(nodes.values()))
                yield self.warn(
                    f"{name}={value} slows the job: {why}",
                    at=nodes,
                    evidence={"variable": name, "values": nodes},
                    fix=on_each(nodes, f"unset {name}"),
                    impact=f"the job runs, but slower: {why}",
                    unless="this run is meant to find a bug",
                )


class EnvOmp(BuiltinCheck, id="env.omp"):
    """OMP_NUM_THREADS times the ranks of a node is no more than its usable cores.

    Where it is not set, torchrun sets 1 for several ranks; other launchers leave each rank as
    many threads as there are cores.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where ranks would fight for cores."""
        yield from self.not_measured(run, "host")
        causes = grouped((c, r.node) for r in run.present if (c := _excess(run, r)) is not None)
        for (said, threads, nproc, cores), nodes in causes.items():
            fitting = max(1, cores // nproc)
            yield self.warn(
                f"{nproc} ranks x {threads} threads on {cores} cores (OMP_NUM_THREADS {said})",
                at=nodes,
                evidence={
                    "variable": "OMP_NUM_THREADS",
                    "num_threads": threads,
                    "num_ranks": nproc,
                    "num_cores": cores,
                },
                fix=(Fix(command=f"export OMP_NUM_THREADS={fitting}"),),
                impact="the job runs, but its CPU work is slowed by threads that wait for a core",
                unless="the program sets its threads itself, or does no work on the CPU",
            )


def _excess(run: Run, report: NodeReport) -> tuple[str, int, int, int] | None:
    """Return (what is said, threads, ranks, cores) where they do not fit."""
    host, launch = report.facts.host, report.facts.launch
    if host is None or launch is None or host.num_cores < 1 or launch.launcher == "hand":
        return None
    nproc = run.nproc(report.node)
    said = launch.environment.get("OMP_NUM_THREADS", "")
    first = said.partition(",")[0].strip()
    is_set_by_torchrun = launch.mode != "env"
    if first.isdigit() and int(first) > 0:
        threads = int(first)
    elif not said and not is_set_by_torchrun:
        threads = host.num_cores
    else:
        return None
    if nproc * threads <= host.num_cores or threads == 1:
        return None  # one thread each is the least there is: lim.cgroup.cpu counts the ranks
    return (f"= {said}" if said else "is not set", threads, nproc, host.num_cores)
