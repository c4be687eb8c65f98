"""Which paths are closed for random ports, and whose side that is: both port checks ask this."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.blame import Blame, Path, blame
from rankscope.preflight.checks.pairs import CLOSED, is_evidence, owners, worst
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts
from rankscope.preflight.model import NodeReport


@dataclass(frozen=True)
class Closed:
    """The closed paths of a run, with the dials that show it."""

    bad: dict[Path, tuple[Dial, ...]]  # those that failed
    good: frozenset[Path]
    blamed: tuple[Blame, ...]
    lacking: tuple[str, ...]  # nodes that tried no path
    doubtful: tuple[Path, ...]  # one silent port among open ones: a lost packet looks the same
    open_doors: frozenset[Path]  # closed for random ports, but the control port answers

    def is_oneway(self, one: Blame) -> bool:
        """Return whether this is a pair that works the other way around."""
        (start, end), *more = one.paths
        return one.side == "pair" and not more and (end, start) in self.good

    def outcome(self, paths: Collection[Path]) -> DialClass:
        """Return how most dials of these paths ended."""
        return worst([dial for path in paths for dial in self.bad[path]])

    def has_open_port(self, paths: Collection[Path]) -> bool:
        """Return whether the control port answers on all of these paths."""
        return all(path in self.open_doors for path in paths)


def closed_paths(run: Run) -> Closed:
    """Judge every path by its dials to ports on which the peer's agent says that it listens."""
    owned = owners(run)
    bad: dict[Path, tuple[Dial, ...]] = {}
    good: list[Path] = []
    lacking: list[str] = []
    doubtful: list[Path] = []
    doors: list[Path] = []
    for report in run.present:
        num_tried = 0
        for peer, edge in report.edges.items():
            holder = run.reports.get(peer)
            if holder is None:
                continue
            dials = _evident(edge, holder, owned)
            failed = tuple(dial for dial in dials if dial.outcome in CLOSED)
            num_tried += bool(dials)
            path = (report.node, peer)
            if dials and not failed:
                good.append(path)
            elif len(failed) == 1 < len(dials) and failed[0].outcome == "drop" and _may_lose(edge):
                doubtful.append(path)
            elif failed:
                bad[path] = failed
                if any(d is not None and d.outcome == "ok" for d in (edge.mesh, edge.master)):
                    doors.append(path)
        if not num_tried and len(run.reports) > 1:
            lacking.append(report.node)
    return Closed(
        bad=bad,
        good=frozenset(good),
        blamed=tuple(blame(bad, [*bad, *good])),
        lacking=tuple(lacking),
        doubtful=tuple(doubtful),
        open_doors=frozenset(doors),
    )


def _may_lose(edge: EdgeFacts) -> bool:
    """Return whether packets get lost here, or may for all we know."""
    sent = edge.bandwidth
    return sent is None or sent.num_segments == 0 or sent.num_retransmits > 0


def _evident(
    edge: EdgeFacts, holder: NodeReport, owned: Mapping[str, frozenset[str]]
) -> tuple[Dial, ...]:
    return tuple(
        dial
        for dial in edge.ephemeral
        if dial.port in holder.listening.ephemeral and is_evidence(owned, holder.node, dial)
    )
