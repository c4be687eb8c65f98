"""One shape for all checks, and what they are given: the merged reports of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Protocol

from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.facts.launch import LaunchFacts, Mode
from rankscope.preflight.model import Finding, NodeReport, Options, Scope, Tier

Need = Literal[
    "peers",  # two nodes or more
    "torch", "gpu", "rdma",  # on one node at least
    "cpu-pace",  # nobody was too busy to time a path: see Run.is_paced
    "checkpoint-dir", "script", "loader",  # options that the user gave
    "smoke",  # the child was started
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """All reports that came together, with the questions that many checks ask."""

    run_id: str
    expected: tuple[str, ...]  # in order of node rank, as far as anybody said
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

    def edge(self, start: str, end: str) -> EdgeFacts | None:
        """Return what `start` measured towards `end`; None if it measured nothing."""
        report = self.reports.get(start)
        return report.edges.get(end) if report is not None else None

    def edges(self) -> Iterator[tuple[str, str, EdgeFacts]]:
        """Yield (from, to, facts) of all measured paths."""
        for report in self.present:
            for peer, edge in report.edges.items():
                yield report.node, peer, edge

    @cached_property
    def launches(self) -> dict[str, LaunchFacts]:
        """Return what each node says of the launch."""
        return {r.node: r.facts.launch for r in self.present if r.facts.launch is not None}

    @cached_property
    def master(self) -> str:
        """Return the node that holds MASTER_PORT: node rank 0, else the first; "" if unknown."""
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
        """Return how the job will meet."""
        launch = self.launches.get(self.master) or next(iter(self.launches.values()), None)
        return launch.mode if launch is not None else "static"

    @cached_property
    def backend(self) -> str:
        """Return gloo or nccl: as asked, else nccl where a node has GPUs."""
        has_gpu = any(r.facts.gpu is not None and r.facts.gpu.num_gpus > 0 for r in self.present)
        return self.options.backend or ("nccl" if has_gpu else "gloo")

    def nproc(self, node: str) -> int:
        """Return how many ranks `node` will run: as asked, else as launched, else its GPUs."""
        launch = self.launches.get(node)
        told = launch.nproc_per_node if launch is not None else None
        gpu = self.reports[node].facts.gpu if node in self.reports else None
        return self.options.nproc or told or (gpu.num_gpus if gpu is not None else 0) or 1

    def gloo_address(self, node: str) -> str:
        """Return the address that gloo on `node` will tell the others; "" if unknown."""
        report = self.reports.get(node)
        interfaces = report.facts.interfaces if report is not None else None
        chosen = interfaces.gloo[0] if interfaces is not None and interfaces.gloo else None
        return chosen.address if chosen is not None else ""


class Check(Protocol):
    """One check; the class docstring is its sentence in the report and in the documents.

    `judge` yields what is wrong; nothing means ok. Where a fact is missing on a node, it yields
    `skipped` (not applicable there) or `unknown` (tried, no answer) with the reason as title.
    It is pure: it touches nothing but `run`. The engine owns needs, limits and exceptions.
    """

    id: ClassVar[str]
    scope: ClassVar[Scope]
    tier: ClassVar[Tier]  # the smallest tier that runs it
    needs: ClassVar[frozenset[Need]]

    def judge(self, run: Run) -> Iterable[Finding]:
        """Return what is wrong in `run`."""
        ...
