"""Which paths are closed, and which ones lead to a stranger: what the dials to random ports say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.blame import Blame, Path, Side, blame
from rankscope.preflight.checks.pairs import CLOSED, arrows, gloo_dials, is_evidence, owners, worst
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts
from rankscope.preflight.facts.rules import FilterRules
from rankscope.preflight.model import STAGES, NodeReport

STRANGERS: frozenset[DialClass] = frozenset(("not-us", "wrong-host"))
# No machine that is merely busy is so late that an answer takes 4 s, twice.
STOPPED_MS = 1000.0
MAX_PORT = 65535


@dataclass(frozen=True)
class Hole:
    """The closed ports among those that were tried on some paths."""

    failed: tuple[int, ...]
    ok: tuple[int, ...]

    @property
    def is_partial(self) -> bool:
        """Return whether other ports are open."""
        return bool(self.ok)

    @property
    def is_one(self) -> bool:
        """Return whether no open port lies between the closed ones."""
        return not any(self.failed[0] < port < self.failed[-1] for port in self.ok)

    def words(self) -> str:
        """Return which ports are closed: "random ports 41,036 to 45,980"."""
        if not self.is_partial:
            return "random ports"
        first, last = self.failed[0], self.failed[-1]
        if self.is_one and first != last:
            return f"random ports {first:,} to {last:,}"
        if self.is_one:
            return f"random port {first:,}"
        return f"{len(self.failed)} of {len(self.failed) + len(self.ok)} random ports tried"


@dataclass(frozen=True)
class Closed:
    """The closed paths of a run, with the dials that show it."""

    bad: dict[Path, tuple[Dial, ...]]  # those that failed
    good: frozenset[Path]
    blamed: tuple[Blame, ...]
    lacking: tuple[str, ...]  # nodes that tried no path
    doubtful: tuple[Path, ...]  # silent, between nodes that hardly ran at all
    open_doors: frozenset[Path]  # closed for random ports, but the control port answers
    strange: dict[Path, tuple[Dial, ...]]  # another program answered, or accepted and was silent
    intercepted: tuple[Blame, ...]  # who is to blame for those
    edges: Mapping[Path, EdgeFacts]

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

    def answers(self, path: Path) -> bool:
        """Return whether the control port of a path answers."""
        return _answers(self.edges[path])

    def breaks(self, run: Run, paths: Collection[Path]) -> bool:
        """Return whether the job dials one of these ports this way."""
        return any(
            is_used(run, path)
            and (self.vanish([path]) or min(d.port for d in self.bad[path]) <= middle(run, path[1]))
            for path in paths
        )

    def vanish(self, paths: Collection[Path]) -> bool:
        """Return whether the ports of these paths are open, and some connections vanish."""
        return all(dial.is_flow for path in paths for dial in self.bad[path])

    def hole(self, paths: Collection[Path]) -> Hole:
        """Return the closed ports of these paths; a port that is open on one of them is none."""
        failed = {dial.port for path in paths for dial in self.bad[path]}
        failed |= {port for path in paths for port in self.edges[path].ephemeral_shut}
        ok = {port for path in paths for port in _open_ports(self.edges[path])}
        return Hole(tuple(sorted(failed)), tuple(sorted(ok - failed)))


def is_used(run: Run, path: Path) -> bool:
    """Return whether the job itself dials this way: NCCL dials both ways, gloo one."""
    return run.backend != "gloo" or gloo_dials(run, *path) is not False


def middle(run: Run, node: str) -> int:
    """Return the last port that gloo listens on at a node, unless half of its range is taken.

    gloo sets SO_REUSEADDR, and for such sockets the kernel hands out the lower half first
    (`inet_csk_find_open_port`). NCCL does not set it.
    """
    report = run.reports.get(node)
    ports = report.facts.ports if report is not None else None
    if run.backend != "gloo" or ports is None or not ports.range_high:
        return MAX_PORT
    return ports.range_low + ((ports.range_high - ports.range_low) >> 2 << 1)


def rules_of(run: Run, node: str) -> FilterRules | None:
    """Return what the packet filter of a node could do; None where that is not known."""
    report = run.reports.get(node)
    ports = report.facts.ports if report is not None else None
    return ports.rules if ports is not None else None


@dataclass
class _Found:
    """What is known so far."""

    bad: dict[Path, tuple[Dial, ...]]
    good: dict[Path, EdgeFacts]
    strange: dict[Path, tuple[Dial, ...]]
    silent: dict[
        Path, tuple[Dial, ...]
    ]  # accepted without data, as is a port that no process holds
    edges: dict[Path, EdgeFacts]
    doubtful: list[Path]
    lacking: list[str]


def closed_paths(run: Run) -> Closed:
    """Evaluate every path by its dials to ports on which the peer's agent says that it listens."""
    found = _Found({}, {}, {}, {}, {}, [], [])
    owned = owners(run)
    for report in run.present:
        num_tried = 0
        for peer, edge in report.edges.items():
            holder = run.reports.get(peer)
            if holder is None:
                continue
            dials = _evident(edge, holder, owned)
            num_tried += bool(dials)
            if dials:
                _sort(found, (report.node, peer), edge, dials, (report, holder))
        if not num_tried and len(run.reports) > 1:
            found.lacking.append(report.node)
    intercepted = _intercepted(run, found)
    taken = {path for one in intercepted for path in one.paths}
    for path, dials in found.silent.items():
        if path in taken:
            found.strange[path] = (*found.strange.get(path, ()), *dials)
        else:
            found.bad[path] = (*found.bad.get(path, ()), *dials)
    good = _telling(found.good, found.bad)
    doors = {path for path in found.bad if _answers(found.edges[path])}
    return Closed(
        bad=found.bad,
        good=frozenset(good),
        blamed=tuple(blame(found.bad, [*found.bad, *good])),
        lacking=tuple(found.lacking),
        doubtful=tuple(found.doubtful),
        open_doors=frozenset(doors),
        strange=found.strange,
        intercepted=tuple(intercepted),
        edges=found.edges,
    )


def _sort(
    found: _Found, path: Path, edge: EdgeFacts, dials: tuple[Dial, ...],
    ends: tuple[NodeReport, NodeReport],
) -> None:  # fmt: skip
    """Put a path where its dials belong."""
    found.edges[path] = edge
    strange = tuple(dial for dial in dials if dial.outcome in STRANGERS)
    silent = tuple(dial for dial in dials if dial.outcome == "no-data")
    closed = tuple(dial for dial in dials if dial.outcome in CLOSED and dial not in silent)
    if strange:
        found.strange[path] = strange
    if silent and not has_lived(ends):
        found.doubtful.append(path)
    elif silent and edge.decoy == "ok":
        found.silent[path] = silent
    else:
        closed += silent
    if closed:
        found.bad[path] = closed
    if all(dial.outcome == "ok" for dial in dials):
        found.good[path] = edge


def has_lived(ends: Iterable[NodeReport]) -> bool:
    """Return whether silence was not that of a process that was stopped, or had no core."""
    return all(
        STAGES.index(end.stage) >= STAGES.index("pairs") and end.delay_p90_ms < STOPPED_MS
        for end in ends
    )


def silent_words(paths: Collection[Path]) -> str:
    """Return what is said of paths on which silence proves nothing."""
    return f"{arrows(paths)}: no data came through, but a node there hardly ran, or not to the end"


def _intercepted(run: Run, found: _Found) -> list[Blame]:
    """Return whose connections another program takes.

    One that accepts whatever is dialled, and is silent, sits with the caller if all that the
    caller dials ends so; else it protects the called node, which is a firewall's way.
    """
    suspects = {**found.strange, **found.silent}
    if not suspects:
        return []
    tested = dict.fromkeys([*suspects, *found.good, *found.bad])
    blamed = []
    for one in blame(suspects, list(tested)):
        one = _known_side(run, one)
        has_spoken = any(path in found.strange for path in one.paths)
        if has_spoken or one.side in ("outbound", "both", "everywhere") or _takes_in(run, one):
            blamed.append(one)
    return blamed


def _takes_in(run: Run, one: Blame) -> bool:
    """Return whether the rules of the called node are known to redirect what comes in."""
    rules = [rules_of(run, node) for node in one.nodes]
    return bool(rules) and all(some is not None and some.redirects_in for some in rules)


def _known_side(run: Run, one: Blame) -> Blame:
    """Name the end of a single path whose rules redirect, where both ends' rules are known."""
    if one.side not in ("pair", "tie"):
        return one
    starts, ends = {start for start, _ in one.paths}, {end for _, end in one.paths}
    out = {n for n in starts if (rules := rules_of(run, n)) is not None and rules.redirects_out}
    into = {n for n in ends if (rules := rules_of(run, n)) is not None and rules.redirects_in}
    if len(out) + len(into) != 1:
        return one
    side: Side = "outbound" if out else "inbound"
    return Blame(side, one.paths, tuple(out or into), is_whole=False)


def _telling(good: Mapping[Path, EdgeFacts], bad: Mapping[Path, tuple[Dial, ...]]) -> list[Path]:
    """Return the good paths that are evidence: a port was tried where others found them closed.

    Where many nodes dial few ports each, a path may be good only because it missed the hole.
    """
    closed: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (start, end), dials in bad.items():
        shut = [dial.port for dial in dials]
        closed["to", end] += shut
        closed["from", start] += shut
    spans = {side: (min(ports), max(ports)) for side, ports in closed.items()}
    telling = []
    for (start, end), edge in good.items():
        near = [spans[side] for side in (("to", end), ("from", start)) if side in spans]
        ports = _open_ports(edge)
        if all(any(first <= port <= last for port in ports) for first, last in near):
            telling.append((start, end))
    return telling


def _answers(edge: EdgeFacts) -> bool:
    return any(dial is not None and dial.outcome == "ok" for dial in (edge.mesh, edge.master))


def _open_ports(edge: EdgeFacts) -> tuple[int, ...]:
    return (*edge.ephemeral_ok, *(d.port for d in edge.ephemeral if d.outcome == "ok"))


def _evident(
    edge: EdgeFacts, holder: NodeReport, owned: Mapping[str, frozenset[str]]
) -> tuple[Dial, ...]:
    return tuple(
        dial
        for dial in edge.ephemeral
        if dial.port in holder.listening.ephemeral and is_evidence(owned, holder.node, dial)
    )
