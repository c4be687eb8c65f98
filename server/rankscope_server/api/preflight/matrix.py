"""The matrix of a preflight, nodes by nodes, and what differs between two preflights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from rankscope.preflight.checks.pairs import is_untried
from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.facts.loss import along
from rankscope.preflight.model import CheckFinding, LaunchVerdict, NodeReport
from rankscope_server.answers import capped
from rankscope_server.api.preflight.schema import (
    PairChange,
    PreflightFinding,
    PreflightFlag,
    PreflightMatrix,
    PreflightMetric,
)
from rankscope_server.text import plural

MAX_NODES = 256
MAX_PAIRS = 200
# Two preflights of one idle pair differ by the load beside them; half as much again is more.
CHANGED_RATIO = 1.5
LEAST_RTT_MS = 0.2  # below, a changed round trip is scheduling and no path
UNITS: dict[PreflightMetric, str] = {
    "connect": "", "rtt": "ms", "mtu": "bytes", "mbit": "Mbit/s", "loss": "ratio",
}  # fmt: skip
Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]


def measured(reports: Mapping[str, NodeReport], start: str, end: str) -> EdgeFacts | None:
    """Return what a node measured towards another; None where that one came too late for it."""
    edge = reports[start].edges.get(end) if start in reports else None
    return None if edge is None or is_untried(reports.get(end), edge) else edge


def state_of(edge: EdgeFacts | None) -> str:
    """Return how connections along a path ended: the first that failed, else ok; "" for none."""
    if edge is None:
        return ""
    dials = [dial for dial in (edge.mesh, edge.master, *edge.ephemeral) if dial is not None]
    failed = next((dial.outcome for dial in dials if dial.outcome != "ok"), "")
    return failed or ("ok" if dials else "")


def value_of(
    edge: EdgeFacts | None, metric: PreflightMetric, back: EdgeFacts | None = None
) -> float | None:
    """Return what was measured along a path; None where it was not.

    `back` is the way back: of loss, it has the other half of what is known of this one.
    """
    lost = along(edge, back) if metric == "loss" else None
    if lost is not None:
        return lost.ratio
    if edge is None:
        return None
    if metric == "rtt":
        return edge.rtt.median_ms if edge.rtt is not None else None
    if metric == "mtu":
        carried = edge.mtu.carried_bytes if edge.mtu is not None else -1
        return float(carried) if carried >= 0 else None
    speed = edge.bandwidth
    if speed is None or metric == "connect":
        return None
    if metric == "mbit":
        return speed.mbit_per_s
    return speed.num_retransmits / speed.num_segments if speed.num_segments else None


def shown_nodes(
    expected: tuple[str, ...], verdict: LaunchVerdict | None, most: int
) -> tuple[str, ...]:
    """Return all nodes, or those that findings name and a sample of the others."""
    if len(expected) <= most:
        return expected
    named = named_nodes(verdict)
    first = [name for name in expected if name in named][:most]
    others = [name for name in expected if name not in named]
    room = most - len(first)
    picked = set(first) | {others[index * len(others) // room] for index in range(room)}
    return tuple(name for name in expected if name in picked)


def named_nodes(verdict: LaunchVerdict | None) -> set[str]:
    """Return the nodes and the ends of paths that findings name."""
    findings = verdict.findings if verdict is not None else ()
    ends = {node for finding in findings for edge in finding.edges for node in edge}
    return ends | {node for finding in findings for node in finding.nodes}


def matrix(
    id: str,
    metric: PreflightMetric,
    expected: tuple[str, ...],
    reports: Mapping[str, NodeReport],
    verdict: LaunchVerdict | None,
    most: int = MAX_NODES,
) -> PreflightMatrix:
    """Return the matrix; above `most` nodes it is a part, and says which."""
    nodes = shown_nodes(expected, verdict, most)
    edges = {(start, end): measured(reports, start, end) for start in nodes for end in nodes}
    rows = [[edges[start, end] for end in nodes] for start in nodes]
    is_cut = len(nodes) < len(expected)
    named = len(named_nodes(verdict) & set(nodes))
    text = plural(len(expected), "node")
    if is_cut:
        text = (
            f"{len(nodes)} of {len(expected):,} nodes: {named} that findings name, "
            f"{len(nodes) - named} of the others, evenly taken"
        )
    return PreflightMatrix(
        id=id,
        metric=metric,
        unit=UNITS[metric],
        text=text,
        nodes=list(nodes),
        states=[[state_of(edge) for edge in row] for row in rows],
        values=[]
        if metric == "connect"
        else [
            [value_of(edges[start, end], metric, edges[end, start]) for end in nodes]
            for start in nodes
        ],
        flags=_flags(nodes, verdict.findings if verdict is not None else ()),
        capped=capped(len(nodes), len(expected)),
    )


def finding_answer(finding: CheckFinding) -> PreflightFinding:
    """Return a finding as the API shows it."""
    return msgspec.convert(msgspec.to_builtins(finding), PreflightFinding)


def compared_findings(
    before: Iterable[CheckFinding], after: Iterable[CheckFinding]
) -> tuple[list[PreflightFinding], list[PreflightFinding], list[PreflightFinding]]:
    """Return (new, gone, same) findings; the same has the same id, nodes and paths."""
    old, new = (
        {_key(finding): finding for finding in before},
        {_key(finding): finding for finding in after},
    )
    return (
        [finding_answer(finding) for key, finding in new.items() if key not in old],
        [finding_answer(finding) for key, finding in old.items() if key not in new],
        [finding_answer(finding) for key, finding in new.items() if key in old],
    )


def compared_pairs(
    before: Mapping[str, NodeReport], after: Mapping[str, NodeReport]
) -> list[PairChange]:
    """Return the paths that both measured and that changed, the worse ones first."""
    found: list[tuple[float, PairChange]] = []
    for start, report in after.items():
        for end in report.edges:
            old, new = measured(before, start, end), measured(after, start, end)
            if old is not None and new is not None:
                found += _changes(start, end, old, new)
    found.sort(key=lambda item: -item[0])
    return [change for _, change in found]


def _changes(
    start: str, end: str, old: EdgeFacts, new: EdgeFacts
) -> Iterable[tuple[float, PairChange]]:
    was, now = state_of(old), state_of(new)
    if was and now and was != now and "ok" in (was, now):
        worse = was == "ok"
        change = PairChange(
            start=start, end=end, metric="connect", before=was, after=now, is_worse=worse
        )
        yield (1e9 if worse else -1e9), change
    for metric in ("rtt", "mbit", "mtu"):
        first, second = value_of(old, metric), value_of(new, metric)
        if first is None or second is None:
            continue
        ratio = _ratio(metric, first, second)
        least = 1.0 if metric == "mtu" else CHANGED_RATIO
        is_noise = metric == "rtt" and abs(second - first) < LEAST_RTT_MS
        if is_noise or 1 / least <= ratio <= least:
            continue
        unit = UNITS[metric]
        change = PairChange(
            start=start, end=end, metric=metric, before=f"{_figure(first)} {unit}",
            after=f"{_figure(second)} {unit}", is_worse=ratio > 1,
        )  # fmt: skip
        yield (ratio if ratio > 1 else -1 / ratio), change


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _ratio(metric: PreflightMetric, first: float, second: float) -> float:
    """Return by what factor a path became worse."""
    small = 1e-6  # nothing came through: as bad as can be, and no division by zero
    if metric == "rtt":
        return max(second, small) / max(first, small)
    return max(first, small) / max(second, small)


def _key(finding: CheckFinding) -> Key:
    return finding.id, tuple(sorted(finding.nodes)), tuple(sorted(finding.edges))


def _flags(nodes: tuple[str, ...], findings: Iterable[CheckFinding]) -> list[PreflightFlag]:
    place = {name: index for index, name in enumerate(nodes)}
    flags = []
    for finding in findings:
        cells = [
            (place[start], place[end]) for start, end in finding.edges if {start, end} <= set(place)
        ]
        if not finding.edges:
            cells = [(place[name], -1) for name in finding.nodes if name in place]
        flags += [
            PreflightFlag(row=row, column=column, finding=finding.id, status=finding.status)
            for row, column in cells
        ]
    return flags
