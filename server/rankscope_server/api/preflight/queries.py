"""What the API shows of preflights: lists, one with its verdict, histories, comparisons."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.preflight.model import EXIT_OK, EXIT_WARN, LaunchVerdict
from rankscope.preflight.verdict.engine import exit_code
from rankscope_server.answers import capped, of_row
from rankscope_server.api.preflight import matrix
from rankscope_server.api.preflight.schema import (
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
from rankscope_server.preflight.live import Live
from rankscope_server.preflight.store import read_verdict, status_of
from rankscope_server.store.projects import of_project
from rankscope_server.store.tables import preflight, preflight_node
from rankscope_server.text import plural

MAX_HISTORY = 200
MAX_LOOKED_AT = 20  # verdicts that are read to find one that let a launch go
# Made at import: two threads that are the first to use a type crash msgspec.
msgspec.json.Decoder(PreflightVerdict)
_COLUMNS = tuple(column for column in preflight.c if column.name not in ("verdict", "token"))


def listing(
    connection: sa.Connection, project: str | None, run: str, limit: int, offset: int
) -> Preflights:
    """Return a page of preflights, newest first; with `run` those that precede this run."""
    table = preflight.c
    where = of_project(preflight, project)
    if run:
        where.append(table.run_id == run)
    total = connection.scalar(sa.select(sa.func.count()).select_from(preflight).where(*where))
    rows = connection.execute(
        sa.select(*_COLUMNS)
        .where(*where)
        .order_by(table.created_ns.desc(), table.id)
        .limit(limit)
        .offset(offset)
    )
    return Preflights(total=int(total or 0), preflights=[_summary(row) for row in rows])


def history(connection: sa.Connection, project: str | None, node: str) -> NodeHistory:
    """Return the preflights of a node, known by its name there or its host name."""
    nodes, heads = preflight_node.c, preflight.c
    where = [sa.or_(nodes.node == node, nodes.host == node), *of_project(preflight, project)]
    joined = preflight_node.join(preflight, heads.id == nodes.preflight_id)
    total = connection.scalar(sa.select(sa.func.count()).select_from(joined).where(*where))
    rows = connection.execute(
        sa.select(
            *(column for column in nodes if column.name != "report"), heads.created_ns,
            heads.run_id,
        )
        .select_from(joined)
        .where(*where)
        .order_by(heads.created_ns.desc())
        .limit(MAX_HISTORY)
    )  # fmt: skip
    found = [_node_row(row) for row in rows]
    return NodeHistory(node=node, preflights=found, capped=capped(len(found), int(total or 0)))


def last_good(connection: sa.Connection, live: Live) -> PreflightSummary | None:
    """Return the newest earlier preflight without a failure that any of these nodes was in."""
    nodes, heads = preflight_node.c, preflight.c
    met = sa.select(nodes.preflight_id).where(nodes.node.in_(live.expected))
    rows = connection.execute(
        sa.select(preflight)
        .where(
            heads.project == live.project, heads.created_ns < live.created_ns,
            heads.status.in_(("ok", "warn")), heads.finished_ns > 0, heads.id.in_(met),
        )
        .order_by(heads.created_ns.desc(), heads.id)
        .limit(MAX_LOOKED_AT)
    )  # fmt: skip
    row = next((row for row in rows if may_launch(read_verdict(row.verdict))), None)
    return None if row is None else _summary(row)


def may_launch(verdict: LaunchVerdict | None) -> bool:
    """Return whether nothing speaks against a launch, and all that it rests on was evaluated."""
    return (
        verdict is not None
        and not verdict.is_partial
        and exit_code(verdict) in (EXIT_OK, EXIT_WARN)
    )


def summary(live: Live) -> PreflightSummary:
    """Return the row of a preflight in a list."""
    statuses = (
        [finding.status for finding in live.verdict.findings] if live.verdict is not None else []
    )
    return _summary(
        live,
        num_nodes=len(live.expected),
        num_failures=statuses.count("fail"),
        num_warnings=statuses.count("warn"),
        status=status_of(live.verdict),
    )


def roster(live: Live) -> PreflightRoster:
    """Return who is expected and who joined."""
    expected = live.expected
    joined = [live.members[name] for name in expected if name in live.members]
    return PreflightRoster(
        id=live.id,
        expected=list(expected),
        missing=[name for name in expected if name not in live.members],
        nodes=[
            of_row(
                PreflightMember,
                member,
                node_rank=_or_none(member.node_rank),
                addresses=list(member.addresses),
                ports=list(member.ports),
            )
            for member in joined
        ],
        pause_ms=live.pause_s * 1e3,
    )  # fmt: skip


def answer(live: Live, verdict: LaunchVerdict | None) -> PreflightAnswer:
    """Return a preflight with its verdict."""
    return PreflightAnswer(
        summary=summary(live),
        is_settled=live.is_settled or bool(live.finished_ns),
        waiting_for=list(live.waiting_for),
        verdict=None if verdict is None else verdict_answer(verdict),
    )


def verdict_answer(verdict: LaunchVerdict) -> PreflightVerdict:
    """Return a verdict as the API shows it."""
    return msgspec.convert(msgspec.to_builtins(verdict), PreflightVerdict)


def comparison(before: Live, after: Live) -> PreflightComparison:
    """Return what differs between two preflights."""
    new, gone, same = matrix.compared_findings(
        before.verdict.findings if before.verdict is not None else (),
        after.verdict.findings if after.verdict is not None else (),
    )
    reports = [
        {name: stored.report for name, stored in live.stored.items()} for live in (before, after)
    ]
    pairs = matrix.compared_pairs(*reports)
    worse = sum(change.is_worse for change in pairs)
    text = (
        f"{plural(len(new), 'new finding')}, {len(gone)} gone, {len(same)} the same; "
        f"{plural(worse, 'path')} worse, {len(pairs) - worse} better"
    )
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
        capped=capped(matrix.MAX_PAIRS, len(pairs)),
    )


def _summary(row: Any, **given: Any) -> PreflightSummary:
    coordinated = "upload" if row.coordinated == "upload" else "server"
    return of_row(
        PreflightSummary, row, run_id=row.run_id or None, coordinated=coordinated, **given
    )


def _node_row(row: Any) -> NodePreflight:
    return of_row(
        NodePreflight,
        row,
        id=row.preflight_id,
        run_id=row.run_id or None,
        node_rank=_or_none(row.node_rank),
        findings=msgspec.json.decode(row.findings, type=list[str]),
    )


def _or_none(node_rank: int) -> int | None:
    return node_rank if node_rank >= 0 else None
