"""Preflights in the store: saved as a whole or node by node, read back as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.preflight.model import (
    CheckFinding,
    LaunchVerdict,
    NodeReport,
    decode_report,
    decode_verdict,
    encode,
)
from rankscope.wire import zstd
from rankscope_server.preflight.live import Live, Member
from rankscope_server.store.engine import upsert
from rankscope_server.store.tables import preflight, preflight_node

PREFLIGHTS_KEPT = 1_000  # the oldest go
MAX_UNPACKED_BYTES = 64 << 20
_HEAD = (
    "run_id", "key", "token", "coordinated", "nodes", "num_nodes", "created_ns", "expires_ns",
    "finished_ns", "status", "num_failures", "num_warnings", "verdict", "project",
)  # fmt: skip
_NODE = ("host", "node_rank", "observed", "joined_ns", "status", "findings", "report")


@dataclass(frozen=True)
class Rows:
    """What one transaction writes of a preflight."""

    head: dict[str, Any]
    nodes: list[dict[str, Any]]

    def save(self, connection: sa.Connection) -> None:
        """Write, and make room."""
        for node in self.nodes:
            node["report"] = pack(node["report"])
        upsert(connection, preflight, [self.head], _HEAD)
        upsert(connection, preflight_node, self.nodes, _NODE)
        _forget_oldest(connection)


def rows_of(live: Live, nodes: Iterable[str]) -> Rows:
    """Return what is to be written of a preflight, and of some of its nodes."""
    verdict = live.verdict
    statuses = [finding.status for finding in verdict.findings] if verdict is not None else []
    head = {
        "id": live.id, "run_id": live.run_id, "key": live.key, "token": live.token,
        "coordinated": live.coordinated, "nodes": msgspec.json.encode(live.nodes).decode(),
        "num_nodes": max(live.num_nodes, len(live.expected)),
        "created_ns": live.created_ns, "expires_ns": live.expires_ns,
        "finished_ns": live.finished_ns, "status": status_of(verdict),
        "num_failures": statuses.count("fail"),
        "num_warnings": statuses.count("warn"),
        "project": live.project,
        "verdict": None if verdict is None else pack(encode(verdict)),
    }  # fmt: skip
    named = findings_by_node(verdict)
    return Rows(head, [_node_row(live, node, named) for node in nodes if node in live.members])


def load_live(connection: sa.Connection, row: sa.Row[Any]) -> Live:
    """Return a preflight as the hub holds it."""
    live = Live(
        id=row.id, token=row.token, created_ns=row.created_ns, expires_ns=row.expires_ns,
        run_id=row.run_id, key=row.key, coordinated=row.coordinated,
        project=row.project, nodes=tuple(msgspec.json.decode(row.nodes)),
        num_nodes=row.num_nodes if row.coordinated == "server" else 0,
    )  # fmt: skip
    found = connection.execute(
        sa.select(preflight_node).where(preflight_node.c.preflight_id == row.id)
    )
    for one in found:
        report = read_report(one.report)
        listening = () if report is None else declared(report)
        addresses = () if report is None else report.addresses
        live.join(
            Member(
                node=one.node, observed=one.observed, node_rank=one.node_rank,
                addresses=addresses, ports=listening, joined_ns=one.joined_ns,
                is_proxied=True,  # not stored: proven once it joins again
            )
        )  # fmt: skip
        if report is not None:
            live.put(report, encode(report))
    live.verdict = read_verdict(row.verdict)
    live.finished_ns = row.finished_ns
    live.evaluated_number = live.number if live.verdict is not None else -1
    live.shown, live.is_unsaved = live.number, False
    live.unsaved.clear()
    return live


def find(connection: sa.Connection, id: str) -> sa.Row[Any] | None:
    """Return the row of a preflight."""
    return connection.execute(sa.select(preflight).where(preflight.c.id == id)).first()


def open_rows(connection: sa.Connection, now_ns: int) -> list[sa.Row[Any]]:
    """Return the preflights that were under way when the server ended."""
    table = preflight.c
    is_open = (table.finished_ns == 0) & (table.expires_ns > now_ns)
    return list(connection.execute(sa.select(preflight).where(is_open)))


def reports_of(
    connection: sa.Connection, id: str, nodes: Iterable[str] | None = None
) -> dict[str, NodeReport]:
    """Return the reports of a preflight, or those of some nodes."""
    table = preflight_node.c
    query = sa.select(table.node, table.report).where(table.preflight_id == id)
    if nodes is not None:
        query = query.where(table.node.in_(list(nodes)))
    found = {node: read_report(data) for node, data in connection.execute(query)}
    return {node: report for node, report in found.items() if report is not None}


def declared(report: NodeReport) -> tuple[int, ...]:
    """Return the TCP ports on which a node says that its agent listens."""
    listening = report.listening
    ports = (listening.mesh, listening.master, *listening.ephemeral)
    return tuple(dict.fromkeys(port for port in ports if port))


def pack(data: bytes | None) -> bytes | None:
    """Return `data` compressed."""
    return None if data is None else zstd.pack(data)


def read_report(data: bytes | None) -> NodeReport | None:
    """Return a stored report; None where there is none, or none that this version understands."""
    try:
        return None if data is None else decode_report(_unpack(data))
    except msgspec.MsgspecError:
        return None


def read_verdict(data: bytes | None) -> LaunchVerdict | None:
    """Return a stored verdict; None where there is none, or none that this version understands."""
    try:
        return None if data is None else decode_verdict(_unpack(data))
    except msgspec.MsgspecError:
        return None


def status_of(verdict: LaunchVerdict | None) -> str:
    """Return the worst status of a verdict; what was evaluated in part only is not ok."""
    if verdict is None:
        return "unknown"
    statuses = {finding.status for finding in verdict.findings}
    worst = next((status for status in ("fail", "warn") if status in statuses), "")
    is_evaluated = any(result.status == "ok" for result in verdict.results)
    return worst or ("ok" if is_evaluated and not verdict.is_partial else "unknown")


def findings_by_node(verdict: LaunchVerdict | None) -> dict[str, list[CheckFinding]]:
    """Return what names each node: as a culprit, or as the end of a bad path."""
    found: dict[str, list[CheckFinding]] = {}
    for finding in verdict.findings if verdict is not None else ():
        ends = {node for edge in finding.edges for node in edge}
        for node in finding.nodes or sorted(ends):
            found.setdefault(node, []).append(finding)
    return found


def _unpack(data: bytes) -> bytes:
    return zstd.unpack(data, MAX_UNPACKED_BYTES)


def _node_row(live: Live, node: str, named: dict[str, list[CheckFinding]]) -> dict[str, Any]:
    member, stored = live.members[node], live.stored.get(node)
    mine = named.get(node, [])
    status = "unknown" if live.verdict is None or stored is None else "ok"
    if mine:
        status = "fail" if any(finding.status == "fail" for finding in mine) else "warn"
    facts = stored.report.facts.host if stored is not None else None
    host = facts.hostname[:255].replace("\x00", "") if facts is not None else ""
    return {
        "preflight_id": live.id, "node": node, "host": host,
        "node_rank": member.node_rank, "observed": member.observed,
        "joined_ns": member.joined_ns, "status": status,
        "findings": msgspec.json.encode([finding.id for finding in mine]).decode(),
        "report": None if stored is None else stored.full,
    }  # fmt: skip


def _forget_oldest(connection: sa.Connection) -> None:
    table = preflight.c
    old = connection.scalars(
        sa.select(table.id).order_by(table.created_ns.desc()).offset(PREFLIGHTS_KEPT)
    ).all()
    if old:
        gone = preflight_node.c.preflight_id.in_(old)
        connection.execute(sa.delete(preflight_node).where(gone))
        connection.execute(sa.delete(preflight).where(table.id.in_(old)))
