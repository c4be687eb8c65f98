"""Which finding is the cause of which: one cause, one finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from rankscope.preflight.checks import CHECKS
from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.blame import Path
from rankscope.preflight.model import CheckFinding
from rankscope.preflight.verdict.impact import impact_of

Covers = Callable[[CheckFinding, Path], bool]


@dataclass(frozen=True)
class Rule:
    """A cause explains a symptom as far as `covers` its paths, or holds all its nodes."""

    causes: tuple[str, ...]
    symptoms: tuple[str, ...]  # ids; "port." means all that begin so
    covers: Covers | None = None  # None: paths do not matter, the nodes decide
    only_class: str = ""  # of the symptom's dials
    always: bool = False  # whatever its nodes
    only_failed: bool = False  # the cause must be a failure: a warning explains no failure
    same_variable: bool = False  # both are about one environment variable, and no other


def _along(cause: CheckFinding, path: Path) -> bool:
    return path in cause.edges


def _between(cause: CheckFinding, path: Path) -> bool:
    return path in cause.edges or path[::-1] in cause.edges


def _into(cause: CheckFinding, path: Path) -> bool:
    return path[1] in cause.nodes


def _out_of(cause: CheckFinding, path: Path) -> bool:
    return path[0] in cause.nodes


def _touching(cause: CheckFinding, path: Path) -> bool:
    return path[0] in cause.nodes or path[1] in cause.nodes


_PORTS = ("port.master.reach", "port.master.identity", "port.intercepted", "port.ephemeral",
          "port.oneway")  # fmt: skip
_SLOW = ("net.latency", "net.jitter", "net.loss", "net.bandwidth")
_RULES = (
    # the same machine, or the same address, twice: whatever is said of these nodes is about both
    Rule(("node.twice",), ("host.dup", "net.dup_ip", "port.", "dns.", "net.", "coll."), _touching),
    Rule(("host.dup",), ("net.dup_ip", "port.", "dns.", "net.", "node.absent", "coll."), _touching),
    Rule(("net.dup_ip",), ("dns.wrong", "dns.loopback", "dns.family", "node.absent", "net.",
                           "dns.self.loopback", "clock.offset", "coll.", *_PORTS), _touching),
    # an interface that is down: nothing of that node comes through
    Rule(("net.down",), ("port.", "net.", "dns.", "coll.", "clock."), _touching),
    Rule(("net.loopback",), ("port.", "coll.", "env.master.rank0", "dns.self.loopback")),
    Rule(("net.loopback",), ("coll.",), always=True, only_failed=True),
    # no way: the kernel's own tables distinguish it from a firewall
    Rule(("net.dup_mac",), ("port.", "net.", "coll.", "node.absent"), _touching),
    Rule(("net.nat", "net.route"), (*_PORTS, "port.intercepted", "net.route.sym", "net.rp_filter",
                                    "net.mtu.path"), _between),
    Rule(("net.route",), ("net.subnet",)),
    Rule(("net.nat", "net.route"), ("coll.",), always=True, only_failed=True),
    Rule(("net.iface.missing", "net.iface.virtual", "net.iface.gloo", "dns.self.loopback"),
         ("net.route", "net.nat"), _touching),
    # who the nodes are, and where they meet
    Rule(("env.nodes",), ("node.absent",), _into),
    Rule(("env.nodes",), ("env.rank.unique",), always=True),
    Rule(("host.dup", "net.dup_ip", "dns.wrong", "dns.loopback"),
         ("env.master.rank0", "env.endpoint.local")),
    Rule(("env.endpoint.local",), ("env.master.rank0",), always=True),
    Rule(("env.rank.unique",), ("env.complete",)),
    Rule(("env.complete",), ("dns.master",), same_variable=True),
    Rule(("env.master.rank0",), ("port.master.identity", "port.master.reach", "port.master.free",
                                 "coll."), always=True),
    # names
    Rule(("env.endpoint.local",), ("dns.loopback", "port.master.reach", "port.master.identity",
                                   "net.iface.", "coll.", "env.agree"), always=True),
    Rule(("dns.digits",), ("dns.master", "dns.wrong", *_PORTS, "coll."), _touching),
    Rule(("dns.master",), ("port.master.reach", "port.master.identity", "coll."), _out_of),
    Rule(("dns.wrong", "dns.loopback", "dns.family"),
         ("dns.master", "node.absent", "net.route.sym", "net.subnet", "coll.", *_PORTS), _along),
    Rule(("dns.family",), ("net.route",), _touching, only_failed=True),
    Rule(("dns.family",), ("coll.",), always=True, only_failed=True),
    Rule(("dns.wrong",), ("dns.family", "dns.loopback"), _along),
    Rule(("dns.self.loopback", "net.iface.missing", "net.iface.virtual", "net.iface.gloo"),
         ("port.ephemeral", "port.oneway", "net.mtu.", "net.route.sym", "net.subnet", "coll."),
         _touching),
    Rule(("dns.self.loopback",), ("net.iface.gloo", "net.iface.nccl", "dns.master")),
    Rule(("net.iface.missing",), ("net.iface.gloo", "net.iface.nccl", "net.iface.virtual")),
    Rule(("net.iface.virtual",), ("net.iface.gloo", "net.iface.nccl")),
    # the endpoint
    Rule(("env.agree",), ("port.master.reach", "port.master.identity"), _out_of),
    Rule(("env.agree",), ("env.rank.unique", "env.complete")),
    Rule(("env.agree",), ("coll.",), always=True, only_failed=True),
    Rule(("port.master.free",), ("port.master.identity", "port.master.reach"), _into),
    Rule(("port.master.free",), ("proc.leftover",)),
    # routes turn a one-way drop into their own finding
    Rule(("net.route.sym",), ("net.rp_filter",)),
    Rule(("net.route.sym",), ("port.oneway", "port.ephemeral", "port.master.reach"), _between,
         only_class="drop"),
    Rule(("net.rp_filter",), ("port.oneway", "port.ephemeral", "port.master.reach"), _along,
         only_class="drop"),
    Rule(("net.rp_filter",), ("net.route.sym",), _touching),
    # a node that cannot call says nothing of those whom it would have called
    Rule(("port.local",), (*_PORTS, "node.absent", "net.", "clock."), _out_of),
    Rule(("port.local",), ("port.count",)),
    # closed ports
    Rule(("port.intercepted",), ("port.ephemeral", "port.oneway", "port.master.reach",
                                 "port.master.identity"), _along),
    Rule(("port.ephemeral",), ("port.oneway", "port.master.reach", "net.route.sym"), _along),
    Rule(("port.oneway",), ("port.master.reach",), _along),
    # paths
    Rule(("net.mtu.path",), ("net.mtu.differs",)),
    Rule(("net.mtu.path",), ("port.ephemeral", "port.oneway", "port.master.reach"), _between,
         only_class="no-data"),
    Rule(("net.mtu.path",), ("net.loss", "net.bandwidth"), _between),  # small ones are timed
    Rule(("net.nic",), ("net.bandwidth", "net.loss", "net.jitter"), _touching),
    Rule(("net.loss",), ("net.latency", "net.jitter", "net.bandwidth"), _between),
    Rule(("net.jitter",), ("net.latency", "net.bandwidth"), _between),
    Rule(("net.latency",), ("net.bandwidth",), _between),
    Rule((*_SLOW, "net.nic"), ("coll.pair",), _touching),
    Rule(_SLOW, ("coll.pair",), _between),
    Rule(("env.unknown", "env.slow_left", "env.omp", "net.iface.missing"), ("env.drift",),
         always=True, same_variable=True),
    Rule(("clock.offset",), ("clock.sync",)),
    # what has failed before is why nodes do not meet in the collective test
    Rule(("node.absent", "node.secret", "net.mtu.path", "port.local", *_PORTS), ("coll.",),
         always=True, only_failed=True),
    Rule(("lim.nofile", "lim.address", "lim.nproc", "lim.shm"), ("coll.",), always=True,
         only_failed=True),
    Rule(("net.iface.missing",), ("coll.rdzv", "coll.gloo"), always=True),  # one has no address
    Rule(("node.absent", "node.secret"), ("host.dup", "fs.shared"), _touching),
    Rule(("node.secret",), ("port.", "net."), _touching),
    # of a node that goes away, and of nodes that never came: nothing else is said about paths there
    Rule(("node.absent",), (*_PORTS, "net.", "clock.", "node.twice"), _touching),
    Rule(("fs.write",), ("fs.shared", "fs.same", "fs.lock")),
    Rule(("fs.shared",), ("fs.same",)),
    Rule(("fs.hang",), ("fs.free", "fs.write", "fs.lock", "fs.shared", "fs.same")),
)  # fmt: skip
_PLACE = {check.id: place for place, check in enumerate(CHECKS)}
_WORST_FIRST = ("fail", "warn", "unknown", "skipped", "ok")


def group(findings: list[CheckFinding], run: Run) -> list[CheckFinding]:
    """Return the causes, worst first, each with what it explains grouped under it.

    A cause is as bad as the worst of what it explains.
    """
    by_id: dict[str, list[int]] = {}
    for number, finding in enumerate(findings):
        by_id.setdefault(finding.id, []).append(number)
    parents: dict[int, int] = {}
    for number, symptom in enumerate(findings):
        cause = _cause(number, symptom, findings, by_id, parents)
        if cause is not None:
            parents[number] = cause
    grouped: dict[int, list[CheckFinding]] = {
        n: [] for n in range(len(findings)) if n not in parents
    }
    for number in parents:
        grouped[_root(number, parents)].append(findings[number])
    causes = [_with(findings[number], some, run) for number, some in grouped.items()]
    return sorted(causes, key=lambda one: _rank(one, run))


def _cause(
    number: int, symptom: CheckFinding, findings: list[CheckFinding], by_id: dict[str, list[int]],
    parents: dict[int, int],
) -> int | None:  # fmt: skip
    """Return the first finding that explains `symptom`, with others where it takes several."""
    left = set(symptom.edges)
    first: int | None = None
    for rule in _RULES:
        if not _is_about(rule, symptom):
            continue
        for candidate in [n for id in rule.causes for n in by_id.get(id, ())]:
            cause = findings[candidate]
            if candidate == number or _root(candidate, parents) == number:
                continue
            if not _may_explain(rule, cause, symptom):
                continue
            if rule.always or _holds(rule, cause, symptom):
                return candidate
            if rule.covers is None:
                continue
            rest = {path for path in left if not rule.covers(cause, path)}
            if len(rest) < len(left):
                left, first = rest, candidate if first is None else first
                if not left:
                    return first
    return None


def _is_about(rule: Rule, symptom: CheckFinding) -> bool:
    is_named = any(
        symptom.id.startswith(id) if id.endswith(".") else symptom.id == id for id in rule.symptoms
    )
    return is_named and rule.only_class in ("", symptom.evidence.get("class"))


def _may_explain(rule: Rule, cause: CheckFinding, symptom: CheckFinding) -> bool:
    if rule.only_failed and cause.status != "fail":
        return False
    return not rule.same_variable or _variables(cause) == _variables(symptom)


def _variables(finding: CheckFinding) -> set[str]:
    """Return the environment variables that a finding is about."""
    several = finding.evidence.get("variables", {})
    one = finding.evidence.get("variable", "")
    return {*several, *([str(one)] if one else [])}


def _holds(rule: Rule, cause: CheckFinding, symptom: CheckFinding) -> bool:
    """Return whether a symptom without paths, or a rule without, is settled by the nodes."""
    by_nodes = rule.covers is None or not symptom.edges
    about = set(cause.nodes)
    if rule.covers is _between:  # a slow pair slows each of its two nodes
        about.update(node for path in cause.edges for node in path)
    return by_nodes and bool(symptom.nodes) and set(symptom.nodes) <= about


def _root(number: int, parents: dict[int, int]) -> int:
    while number in parents:
        number = parents[number]
    return number


def _with(cause: CheckFinding, symptoms: list[CheckFinding], run: Run) -> CheckFinding:
    status = min([cause.status, *(s.status for s in symptoms)], key=_WORST_FIRST.index)
    explained = tuple(f"{one.id}: {one.title}" for one in symptoms)
    worse = msgspec.structs.replace(cause, status=status, explains=(*cause.explains, *explained))
    return msgspec.structs.replace(worse, impact=worse.impact or impact_of(worse, run))


def _rank(finding: CheckFinding, run: Run) -> tuple[int, int, int, tuple[str, ...]]:
    place = {name: number for number, name in enumerate(run.expected)}
    first = min((place.get(name, len(place)) for name in _names(finding)), default=len(place))
    return (
        _WORST_FIRST.index(finding.status), _PLACE.get(finding.id, len(_PLACE)), first,
        finding.nodes,
    )  # fmt: skip


def _names(finding: CheckFinding) -> Iterable[str]:
    return finding.nodes or tuple(name for path in finding.edges for name in path)
