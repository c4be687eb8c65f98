"""What the API shows of preflights: lists, one with its verdict, histories, comparisons."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.preflight.model import Verdict
from rankscope_server.answers import Capped, to_ms
from rankscope_server.preflight import matrix
from rankscope_server.preflight.live import Live
from rankscope_server.preflight.schema import (
    NodeHistory,
    NodePreflight,
    PreflightAnswer,
    PreflightComparison,
    PreflightMember,
    PreflightRoster,
    Preflights,
    PreflightSummary,
    PreflightVerdict,
)
from rankscope_server.preflight.store import status_of
from rankscope_server.preflight.tables import preflight, preflight_node
from rankscope_server.text import plural

MAX_HISTORY = 200
# Made at import: two threads that are the first to use a type crash msgspec.
msgspec.json.Decoder(PreflightVerdict)
_COLUMNS = tuple(column for column in preflight.c if column.name not in ("verdict", "token"))


def listing(connection: sa.Connection, run: str, limit: int, offset: int) -> Preflights:
    """Return a page of preflights, newest first; with `run` those that precede this run."""
    table = preflight.c
    where = [table.run_id == run] if run else []
    total = connection.scalar(sa.select(sa.func.count()).select_from(preflight).where(*where))
    rows = connection.execute(
        sa.select(*_COLUMNS)
        .where(*where)
        .order_by(table.created_ns.desc(), table.id)
        .limit(limit)
        .offset(offset)
    )
    return Preflights(total=int(total or 0), preflights=[_summary_of_row(row) for row in rows])


def history(connection: sa.Connection, node: str) -> NodeHistory:
    """Return the preflights of a node, known by its name there or its host name."""
    nodes, heads = preflight_node.c, preflight.c
    rows = connection.execute(
        sa.select(
            *(column for column in nodes if column.name != "report"), heads.created_ns,
            heads.run_id,
        )
        .join(preflight, heads.id == nodes.preflight_id)
        .where(sa.or_(nodes.node == node, nodes.host == node))
        .order_by(heads.created_ns.desc())
        .limit(MAX_HISTORY)
    )  # fmt: skip
    return NodeHistory(node=node, preflights=[_node_row(row) for row in rows])


def summary(live: Live) -> PreflightSummary:
    """Return the row of a preflight in a list."""
    statuses = [one.status for one in live.verdict.findings] if live.verdict is not None else []
    return _summary(
        id=live.id, run_id=live.run_id, coordinated=live.coordinated, created_ns=live.created_ns,
        finished_ns=live.finished_ns, num_nodes=len(live.expected),
        num_failures=statuses.count("fail"), num_warnings=statuses.count("warn"),
        status=status_of(live.verdict),
    )  # fmt: skip


def roster(live: Live) -> PreflightRoster:
    """Return who is expected and who joined."""
    expected = live.expected
    joined = [live.members[name] for name in expected if name in live.members]
    return PreflightRoster(
        id=live.id,
        expected=list(expected),
        missing=[name for name in expected if name not in live.members],
        nodes=[
            PreflightMember(
                node=one.node, node_rank=_or_none(one.node_rank), observed=one.observed,
                addresses=list(one.addresses), ports=list(one.ports),
                joined_ms=to_ms(one.joined_ns),
            )
            for one in joined
        ],
        pause_ms=live.pause_s * 1e3,
    )  # fmt: skip


def answer(live: Live, verdict: Verdict | None) -> PreflightAnswer:
    """Return a preflight with its verdict."""
    return PreflightAnswer(
        summary=summary(live),
        is_settled=live.is_settled or bool(live.finished_ns),
        waiting_for=list(live.waiting_for),
        verdict=None if verdict is None else verdict_shape(verdict),
    )


def verdict_shape(verdict: Verdict) -> PreflightVerdict:
    """Return a verdict as the API tells it."""
    return msgspec.convert(msgspec.to_builtins(verdict), PreflightVerdict)


def comparison(before: Live, after: Live) -> PreflightComparison:
    """Return what differs between two preflights."""
    new, gone, same = matrix.compared_findings(
        before.verdict.findings if before.verdict is not None else (),
        after.verdict.findings if after.verdict is not None else (),
    )
    reports = [{name: one.report for name, one in live.stored.items()} for live in (before, after)]
    pairs = matrix.compared_pairs(*reports)
    worse = sum(change.is_worse for change in pairs)
    text = (
        f"{plural(len(new), 'new finding')}, {len(gone)} gone, {len(same)} the same; "
        f"{plural(worse, 'path')} worse, {len(pairs) - worse} better"
    )
    is_cut = len(pairs) > matrix.MAX_PAIRS
    return PreflightComparison(
        before=summary(before),
        after=summary(after),
        text=text,
        new=new,
        gone=gone,
        same=same,
        pairs=pairs[: matrix.MAX_PAIRS],
        nodes_new=sorted(set(reports[1]) - set(reports[0])),
        nodes_gone=sorted(set(reports[0]) - set(reports[1])),
        capped=Capped(shown=matrix.MAX_PAIRS, total=len(pairs)) if is_cut else None,
    )


def _summary_of_row(row: sa.Row[Any]) -> PreflightSummary:
    return _summary(
        id=row.id, run_id=row.run_id, coordinated=row.coordinated, created_ns=row.created_ns,
        finished_ns=row.finished_ns, num_nodes=row.num_nodes, num_failures=row.num_failures,
        num_warnings=row.num_warnings, status=row.status,
    )  # fmt: skip


def _summary(
    *, id: str, run_id: str, coordinated: str, created_ns: int, finished_ns: int, num_nodes: int,
    num_failures: int, num_warnings: int, status: str,
) -> PreflightSummary:  # fmt: skip
    return PreflightSummary(
        id=id,
        run_id=run_id or None,
        coordinated="upload" if coordinated == "upload" else "server",
        created_ms=created_ns / 1e6,
        finished_ms=to_ms(finished_ns),
        num_nodes=num_nodes,
        num_failures=num_failures,
        num_warnings=num_warnings,
        status=status,
    )


def _node_row(row: Any) -> NodePreflight:
    return NodePreflight(
        id=row.preflight_id,
        run_id=row.run_id or None,
        node=row.node,
        host=row.host,
        node_rank=_or_none(row.node_rank),
        observed=row.observed,
        created_ms=row.created_ns / 1e6,
        status=row.status,
        findings=msgspec.json.decode(row.findings, type=list[str]),
    )


def _or_none(node_rank: int) -> int | None:
    return node_rank if node_rank >= 0 else None
