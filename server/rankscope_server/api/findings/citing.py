"""What the preflight before a run found about the hosts that a later finding names.

Detectors stay pure: this is added when a finding is read. Only what bears on the kind of the
finding is cited, and a measurement is shown as a number, never as a verdict of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any

import sqlalchemy as sa

from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.model import LaunchVerdict, NodeReport
from rankscope_server.api.findings.schema import Evidence
from rankscope_server.api.preflight.matrix import measured, state_of
from rankscope_server.preflight import store
from rankscope_server.store import tables
from rankscope_server.store.tables import preflight, preflight_node

HOUR_NS = 3600 * 10**9  # before the start of a run that names no preflight of its own
MAX_CANDIDATES = 20
MAX_HOSTS = 4  # of more, pairs are too many to read
MAX_LINES = 4
_NETWORK = ("paths", "ports", "interfaces", "names", "rdma", "collective")
_MACHINE = ("gpu", "limits")
# By kind of finding: the families of checks that bear on it.
FAMILIES: dict[str, tuple[str, ...]] = {
    "hang": (*_NETWORK, *_MACHINE, "launch"),
    "crash": (*_MACHINE, "storage", "software"),
    "failed_start": ("launch", "ports", "storage", "software", *_MACHINE),
    "slow_link": _NETWORK,
    "communication_bound": _NETWORK,
    "low_bus_bandwidth": _NETWORK,
    "clock_offset": ("clock",),
    "clock_drift": ("clock",),
    "slow_data": ("storage", "limits"),
    "slow_checkpoint": ("storage",),
    "version_drift": ("software",),
    **dict.fromkeys(
        ("slow_compute", "host_contention", "thermal_or_power", "xid", "gpu_error", "throttle",
         "power_cap", "ecc", "gpu_outlier"),
        _MACHINE,
    ),
}  # fmt: skip
_MEASURED = frozenset(("hang", "slow_link", "communication_bound", "low_bus_bandwidth"))


class Citing:
    """Cites the preflight of one run; reads the store only where a finding asks."""

    def __init__(self, connection: sa.Connection, run: sa.Row[Any]) -> None:
        self._connection, self._run = connection, run
        self._found: dict[str, LaunchVerdict | None] = {}

    def about(self, body: dict[str, Any], opened_ns: int) -> list[Evidence]:
        """Return the lines for a finding, none where no preflight bears on it."""
        kind, hosts = str(body.get("kind", "")), [str(host) for host in body.get("hosts", [])]
        if kind not in FAMILIES or not 0 < len(hosts) <= MAX_HOSTS:
            return []
        for row in self._candidates:
            if row.created_ns > opened_ns:
                continue  # it came after: it is no word of what was known before
            nodes = self._nodes_of(row, hosts)
            if nodes:
                return self._lines(row, kind, nodes)[:MAX_LINES]
        return []

    @cached_property
    def _candidates(self) -> list[sa.Row[Any]]:
        """Return preflights that may precede the run, those that name it first."""
        table, run = preflight.c, self._run
        started_ns = run.started_ns or run.received_ns
        near = (
            (table.run_id == "")
            & (table.created_ns <= started_ns)
            & (table.created_ns >= started_ns - HOUR_NS)
        )
        rows = self._connection.execute(
            sa.select(preflight)
            .where(
                table.project == run.project, table.verdict.is_not(None),
                sa.or_(table.run_id == run.run_id, near),
            )
            .order_by((table.run_id == run.run_id).desc(), table.created_ns.desc())
            .limit(MAX_CANDIDATES)
        ).all()  # fmt: skip
        return [row for row in rows if row.run_id or self._covers(row)]

    def _covers(self, row: sa.Row[Any]) -> bool:
        """Return whether all hosts of the run were in a preflight that names no run."""
        nodes = self._names(row)
        return bool(self._hosts) and all(_node_of(host, nodes) for host in self._hosts)

    @cached_property
    def _hosts(self) -> list[str]:
        ranks = tables.rank.c
        found = sa.select(ranks.host).where(ranks.run_id == self._run.run_id, ranks.host != "")
        return list(self._connection.scalars(found.distinct()))

    def _names(self, row: sa.Row[Any]) -> list[tuple[str, str]]:
        """Return (node, host name) of the nodes of a preflight."""
        nodes = preflight_node.c
        found = sa.select(nodes.node, nodes.host).where(nodes.preflight_id == row.id)
        return [(node, host) for node, host in self._connection.execute(found)]

    def _nodes_of(self, row: sa.Row[Any], hosts: Sequence[str]) -> list[str]:
        names = self._names(row)
        return [node for host in hosts if (node := _node_of(host, names))]

    def _lines(self, row: sa.Row[Any], kind: str, nodes: list[str]) -> list[Evidence]:
        if row.id not in self._found:
            self._found[row.id] = store.read_verdict(row.verdict)
        verdict = self._found[row.id]
        if verdict is None:
            return []
        at = f"Preflight at {_clock(row.created_ns)}"
        link = f"api/v1/preflight/runs/{row.id}/verdict"
        lines = [f"{at} found: {title}" for title in _titles(verdict, kind, nodes)]
        if kind in _MEASURED:
            reports = store.reports_of(self._connection, row.id, nodes)
            lines += [f"{at} measured {text}" for text in _measured(nodes, reports)]
        return [Evidence(text=text, link=link) for text in lines]


def _node_of(host: str, names: Iterable[tuple[str, str]]) -> str:
    """Return the node that is this host; a short name is the same as its long form."""
    for node, hostname in names:
        if any(_is_same(host, name) for name in (node, hostname) if name):
            return node
    return ""


def _is_same(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _titles(verdict: LaunchVerdict, kind: str, nodes: Sequence[str]) -> list[str]:
    family = {result.id: result.family for result in verdict.results}
    named = set(nodes)
    titles = []
    for finding in verdict.findings:
        ends = {node for edge in finding.edges for node in edge}
        is_about = named & set(finding.nodes) if finding.nodes else named & ends
        if is_about and family.get(finding.id) in FAMILIES[kind]:
            titles.append(finding.title)
    return titles


def _measured(nodes: Sequence[str], reports: dict[str, NodeReport]) -> list[str]:
    """Return the paths between the nodes, the slower direction of each; of one, its slowest."""
    if len(nodes) == 1:
        return _slowest(nodes[0], reports)
    best: dict[frozenset[str], tuple[float, str]] = {}
    for start, end in permutations(nodes, 2):
        edge = measured(reports, start, end)
        text = _words(edge)
        if edge is None or not text:
            continue
        speed = edge.bandwidth.mbit_per_s if edge.bandwidth is not None else float("inf")
        pair = frozenset((start, end))
        if pair not in best or speed < best[pair][0]:
            best[pair] = (speed, f"{start} to {end}: {text}")
    return [text for _, text in sorted(best.values())]


def _slowest(node: str, reports: dict[str, NodeReport]) -> list[str]:
    edges = reports[node].edges if node in reports else {}
    speeds = {
        peer: edge.bandwidth.mbit_per_s
        for peer, edge in edges.items()
        if edge.bandwidth is not None
    }
    if not speeds:
        return []
    peer = min(speeds, key=lambda name: speeds[name])
    text = f"{node} to {peer}: {_words(edges[peer])}"
    if len(speeds) > 1:
        usual = statistics.median(speeds.values())
        text += f", the slowest of its {len(speeds)} paths (median {usual:,.4g} Mbit/s)"
    return [text]


def _words(edge: EdgeFacts | None) -> str:
    if edge is None:
        return ""
    state = state_of(edge)
    if state not in ("", "ok"):
        return f"connections ended as {state}"
    words = []
    if edge.bandwidth is not None:
        words.append(f"{edge.bandwidth.mbit_per_s:,.4g} Mbit/s")
    if edge.rtt is not None:
        words.append(f"{edge.rtt.median_ms:.3g} ms round trip")
    return ", ".join(words)


def _clock(ns: int) -> str:
    is_today = time.time() - ns / 1e9 < 12 * 3600
    return time.strftime("%H:%M UTC" if is_today else "%Y-%m-%d %H:%M UTC", time.gmtime(ns / 1e9))
