"""What a check is, what it is given (the merged reports of a run), and how it makes findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar, Unpack

from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.facts.launch import LaunchFacts, Mode
from rankscope.preflight.model import (
    CheckFinding,
    Confidence,
    Facts,
    Fix,
    Gone,
    NodeReport,
    Owner,
    Scope,
    Status,
    gone_nodes,
)
from rankscope.preflight.options import Options, Tier

Need = Literal[
    "peers",  # two nodes or more
    "torch", "gpu", "rdma",  # on one node at least
    "cpu-pace",  # no node was too busy to time a path
    "checkpoint-dir", "script", "loader",  # options that the user gave
    "smoke",  # the child was started
]  # fmt: skip


Key = TypeVar("Key")
Part = TypeVar("Part")
BUSY_MS = 15.0  # p90 by which a 20 ms sleep is late: above, no path can be timed
_MAX_LISTED = 4  # names in a title; the finding itself holds them all


@dataclass(frozen=True)
class Run:
    """All reports that came together, with the questions that many checks ask."""

    run_id: str
    expected: tuple[str, ...]  # in order of node rank, as far as it is known
    reports: Mapping[str, NodeReport]
    options: Options = field(default_factory=Options)

    @cached_property
    def present(self) -> tuple[NodeReport, ...]:
        """Return the reports that came, in the order of `expected`."""
        known = [name for name in self.expected if name in self.reports]
        known += sorted(set(self.reports) - set(known))
        return tuple(self.reports[name] for name in known)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Return the names of those who never reported."""
        return tuple(name for name in self.expected if name not in self.reports)

    @cached_property
    def gone(self) -> dict[str, Gone]:
        """Return those who reported, and then died or fell silent."""
        return gone_nodes(self.reports)

    def edge(self, start: str, end: str) -> EdgeFacts | None:
        """Return what `start` measured towards `end`; None if it measured nothing."""
        report = self.reports.get(start)
        return report.edges.get(end) if report is not None else None

    def edges(self) -> Iterator[tuple[str, str, EdgeFacts]]:
        """Yield (from, to, facts) of all measured paths."""
        for report in self.present:
            for peer, edge in report.edges.items():
                yield report.node, peer, edge

    def each(self, part: Callable[[Facts], Part | None]) -> dict[str, Part]:
        """Return a part of the facts by node, of the nodes that have it."""
        found = ((report.node, part(report.facts)) for report in self.present)
        return {node: facts for node, facts in found if facts is not None}

    @cached_property
    def launches(self) -> dict[str, LaunchFacts]:
        """Return what each node says of the launch."""
        return self.each(lambda facts: facts.launch)

    @cached_property
    def master(self) -> str:
        """Return the node that will hold MASTER_PORT; "" if unknown.

        In a c10d rendezvous it is the one that takes the endpoint for its own, else node rank 0,
        else the one that answers at MASTER_ADDR, else the first of the list.
        """
        if self.mode == "c10d" and len(self.store_hosts) == 1:
            return self.store_hosts[0]
        for report in self.present:
            if report.node_rank == 0 and is_ranked(report):
                return report.node
        calls = [r.endpoint.dial for r in self.present if r.endpoint and r.endpoint.is_said]
        answering = {dial.answered_by for dial in calls if dial and dial.outcome == "ok"}
        if len(answering) == 1 and answering <= set(self.reports):
            return answering.pop()
        for report in self.present:
            if report.node_rank == 0:
                return report.node
        return self.expected[0] if self.expected else ""

    @cached_property
    def master_port(self) -> int:
        """Return MASTER_PORT, as the master says it, else as most do."""
        says = [launch.master_port for launch in self.launches.values()]
        if self.master in self.launches:
            return self.launches[self.master].master_port
        return max(set(says), key=says.count) if says else 29500

    @cached_property
    def mode(self) -> Mode:
        """Return how the job will meet, as most nodes say it."""
        says: list[Mode] = [launch.mode for launch in self.launches.values()]
        return max(says, key=says.count) if says else "static"

    @cached_property
    def store_hosts(self) -> tuple[str, ...]:
        """Return the nodes that take the endpoint of a c10d rendezvous for their own."""
        return tuple(report.node for report in self.present if opens_store(report))

    @cached_property
    def backend(self) -> str:
        """Return gloo or nccl: as asked, else nccl where a node has GPUs."""
        has_gpu = any(r.facts.gpu is not None and r.facts.gpu.num_gpus > 0 for r in self.present)
        return self.options.backend or ("nccl" if has_gpu else "gloo")

    def container(self, node: str) -> str:
        """Return the kind of container that `node` runs in; "" for none, or if unknown."""
        host = self.reports[node].facts.host
        return host.container if host is not None else ""

    def nproc(self, node: str) -> int:
        """Return how many ranks `node` will run: as asked, else as launched, else its GPUs."""
        launch = self.launches.get(node)
        launched = launch.nproc_per_node if launch is not None else None
        gpu = self.reports[node].facts.gpu if node in self.reports else None
        return self.options.nproc or launched or (gpu.num_gpus if gpu is not None else 0) or 1

    def gloo_address(self, node: str) -> str:
        """Return the address that gloo on `node` advertises; "" if unknown."""
        report = self.reports.get(node)
        interfaces = report.facts.interfaces if report is not None else None
        chosen = interfaces.gloo[0] if interfaces is not None and interfaces.gloo else None
        return chosen.address if chosen is not None else ""


def is_ranked(report: NodeReport) -> bool:
    """Return whether a launcher has numbered the node; else its place in a list is its number."""
    launch = report.facts.launch
    return launch is not None and (launch.node_rank is not None or launch.rank is not None)


def opens_store(report: NodeReport) -> bool | None:
    """Return whether a node will host the store of a c10d rendezvous; None: not known."""
    launch, names = report.facts.launch, report.facts.names
    if launch is not None and launch.is_store_host is not None:
        return launch.is_store_host
    return names.opens_store if names is not None else None


def worker_host(run: Run) -> tuple[str, str]:
    """Return the node that gets rank 0 in a c10d rendezvous, and the name by which it is called.

    torch sorts the nodes by --local-addr, else by their full names; the first has rank 0, and its
    workers open a second store there, at a random port.
    """
    names = {}
    for report in run.present:
        launch, facts = report.facts.launch, report.facts.names
        said = launch.local_addr if launch is not None else ""
        names[report.node] = said or (facts.full_name if facts is not None else "")
    if run.mode != "c10d" or run.absent or not names or not all(names.values()):
        return "", ""
    node = min(names, key=lambda name: (names[name], name))
    return node, names[node]


class Check(Protocol):
    """One check; the class docstring is its sentence in the report and in the documents.

    `evaluate` yields what is wrong; nothing means ok. Where a fact is missing on a node, it yields
    `skipped` (not applicable there) or `unknown` (tried, no answer) with the reason as title.
    It is pure: it touches nothing but `run`. The engine owns needs, limits and exceptions.
    """

    id: ClassVar[str]
    scope: ClassVar[Scope]
    tier: ClassVar[Tier]  # the smallest tier that runs it
    needs: ClassVar[frozenset[Need]]

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Return what is wrong in `run`."""
        ...


class Details(TypedDict, total=False):
    """The fields of a `CheckFinding` beside its id, status and title."""

    at: Iterable[str]  # nodes that stand before the title: "node1, node2: the title"
    nodes: Iterable[str]
    edges: Iterable[tuple[str, str]]
    evidence: dict[str, Any]
    lines: Iterable[str]
    fix: Iterable[Fix]
    impact: str
    unless: str
    confidence: Confidence


class BuiltinCheck:
    """A check of this package: the class line says what it is, and its methods make findings."""

    id: ClassVar[str]
    scope: ClassVar[Scope]
    tier: ClassVar[Tier]
    needs: ClassVar[frozenset[Need]]

    def __init_subclass__(
        cls, id: str = "", scope: Scope = "node", tier: Tier = "quick", needs: Iterable[Need] = ()
    ) -> None:
        cls.id, cls.scope, cls.tier, cls.needs = id, scope, tier, frozenset(needs)

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Return what is wrong in `run`."""
        raise NotImplementedError

    @classmethod
    def finding(cls, status: Status, title: str, **details: Unpack[Details]) -> CheckFinding:
        """Return a finding of this check."""
        fields: dict[str, Any] = dict(details)
        if at := tuple(fields.pop("at", ())):
            title, fields["nodes"] = f"{listed(at)}: {title}", at
        for name in ("nodes", "edges", "lines", "fix"):
            fields[name] = tuple(fields.get(name, ()))
        return CheckFinding(id=cls.id, status=status, title=title, **fields)

    @classmethod
    def fail(cls, title: str, **details: Unpack[Details]) -> CheckFinding:
        """Return a failure: the launch fails, hangs or shrinks."""
        return cls.finding("fail", title, **details)

    @classmethod
    def warn(cls, title: str, **details: Unpack[Details]) -> CheckFinding:
        """Return a warning: the job runs, but slower, by luck, or not for long."""
        return cls.finding("warn", title, **details)

    @classmethod
    def skipped(cls, title: str, **details: Unpack[Details]) -> CheckFinding:
        """Return that the question does not apply."""
        return cls.finding("skipped", title, **details)

    @classmethod
    def unknown(cls, title: str, **details: Unpack[Details]) -> CheckFinding:
        """Return that the question was asked and not answered."""
        return cls.finding("unknown", title, **details)

    @classmethod
    def note(cls, status: Status, nodes: Iterable[str], title: str) -> Iterator[CheckFinding]:
        """Yield a finding about `nodes`, if there are any."""
        if where := tuple(nodes):
            yield cls.finding(status, title, at=where)

    @classmethod
    def not_measured(cls, run: Run, part: str) -> Iterator[CheckFinding]:
        """Yield a finding for each reason why nodes lack a part of the facts."""
        without: dict[tuple[Status, str], list[str]] = defaultdict(list)
        for report in run.present:
            if getattr(report.facts, part) is not None:
                continue
            troubles = [trouble for trouble in report.troubles if trouble.part == part]
            status: Status = troubles[0].status if troubles else "unknown"
            reason = troubles[0].reason if troubles else f"its report holds nothing about {part}"
            without[status, reason].append(report.node)
        for (status, reason), nodes in without.items():
            yield cls.finding(status, reason, at=nodes)


def on_each(nodes: Iterable[str], command: str, owner: Owner = "you") -> tuple[Fix, ...]:
    """Return the same repair for each of `nodes`."""
    return tuple(Fix(node=node, command=command, owner=owner) for node in nodes)


def listed(nodes: Collection[str]) -> str:
    """Return names for a title: "node1, node2", or "node1, node2, node3, node4 and 60 more"."""
    names = list(nodes)
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_MAX_LISTED])} and {len(names) - _MAX_LISTED} more"


def grouped(pairs: Iterable[tuple[Key, str]]) -> dict[Key, list[str]]:
    """Return the nodes of each cause, from (cause, node) in the order in which they come."""
    groups: dict[Key, list[str]] = defaultdict(list)
    for cause, node in pairs:
        groups[cause].append(node)
    return groups
