"""Live runs as series for Prometheus: so many of a run, whatever its size.

What is not known has no series. A run that is over stays a while, so that a scrape sees its end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import sqlalchemy as sa
from prometheus_client.core import GaugeMetricFamily

from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import json_object
from rankscope_server.api.runs.queries import NUM_MISSING, silent_rank, status_of
from rankscope_server.api.runs.schema import AnswerState, RunStatus
from rankscope_server.api.service import Service
from rankscope_server.findings.finding import SEVERITIES
from rankscope_server.store import tables
from rankscope_server.store.engine import StoreUnavailableError

MAX_RUNS = 50
WORST_RANKS = 3
_OVER = ("ended", "failed")
_LIVE_NS, _OVER_NS = 86_400 * 10**9, 900 * 10**9  # for how long after the last batch
_ANSWERS: tuple[AnswerState, ...] = get_args(AnswerState)
_STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)

# name, what it is, the labels beside `run`
_FAMILIES = (
    ("info", "A run: its name, its project and what started it.", ("name", "project", "launcher")),
    ("status", "1 for the status that it has.", ("status",)),
    ("answer", "1 for what the analysis says of it.", ("answer",)),
    ("open_findings", "Findings that are not over.", ("severity",)),
    ("verdict_cost_ratio", "Share of its throughput that the verdict costs.", ()),
    ("step", "The largest step that was seen.", ()),
    ("last_batch_timestamp_seconds", "When its last batch came.", ()),
    ("ranks", "Ranks of its newest attempt.", ("state",)),
    ("records_lost", "Records that its agents lost.", ()),
    ("batches_missing", "Batches that did not come, though later ones did.", ()),
    ("rank_seconds", "Where the time of its ranks went.", ("part",)),
    (
        "rank_cost_ratio",
        f"Share of the throughput that a finding costs which names the rank; the worst "
        f"{WORST_RANKS} ranks.",
        ("rank", "host", "kind"),
    ),
)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """How many ranks of the newest attempt are known, and of those."""

    known: int = 0
    silent: int = 0
    ended: int = 0


def run_series(service: Service) -> list[GaugeMetricFamily]:
    """Return the series of the newest runs, and whether they could be read."""
    families = {
        name: GaugeMetricFamily(f"rankscope_run_{name}", text, labels=("run", *labels))
        for name, text, labels in _FAMILIES
    }
    total: int | None = None
    try:
        with service.read() as connection:
            total = _fill(families, connection, service)
    except (StoreUnavailableError, sa.exc.SQLAlchemyError):
        families.clear()
    readable = GaugeMetricFamily(
        "rankscope_run_series_up", "0 while series of runs cannot be read.", value=total is not None
    )
    left_out = GaugeMetricFamily("rankscope_run_series_left_out", "Runs without series.")
    if total is not None:
        left_out.add_metric((), max(total - MAX_RUNS, 0))
    return [readable, left_out, *families.values()]


def _fill(
    families: Mapping[str, GaugeMetricFamily], connection: sa.Connection, service: Service
) -> int:
    """Add the numbers of each run; return how many runs there are."""
    runs, total = _runs(connection)
    names = [run.run_id for run in runs]
    ranks = _ranks(connection, {name: service.silent_before_ns(name) for name in names})
    lost, missing = _lost(connection, names), _missing(connection, names)
    findings = _findings(connection, names)
    hosts = _hosts(connection, findings)
    for run in runs:
        own = _of_run(run, ranks.get(run.run_id, _Ranks()))
        own += [
            ("records_lost", (), max(lost.get(run.run_id, 0), 0)),
            ("batches_missing", (), missing.get(run.run_id, 0)),
        ]
        own += _of_findings(run.run_id, findings.get(run.run_id, []), hosts)
        for name, labels, value in own:
            families[name].add_metric((run.run_id, *labels), value)
    return total


_Point = tuple[str, tuple[str, ...], float]  # family, labels, value


def _of_run(run: sa.Row[Any], ranks: _Ranks) -> list[_Point]:
    status = status_of(run.status)
    answer = (json_object(run.answer) or {"state": "waiting"})["state"]
    verdict = json_object(run.verdict) or {}
    points: list[_Point] = [
        ("info", (run.name or run.run_id, run.project, run.launcher), 1),
        ("step", (), run.step),
        ("last_batch_timestamp_seconds", (), run.received_ns / 1e9),
        ("ranks", ("expected",), max(run.world_size, ranks.known)),
        ("ranks", ("reporting",), ranks.known - ranks.silent - ranks.ended),
        ("ranks", ("silent",), ranks.silent),
        ("ranks", ("ended",), ranks.ended),
    ]
    points += [("status", (each,), each == status) for each in _STATUSES]
    points += [("answer", (each,), each == answer) for each in _ANSWERS]
    cost = verdict.get("cost_throughput_ratio")
    if cost is not None:
        points.append(("verdict_cost_ratio", (), cost))
    parts = (json_object(run.cost) or {}).get("parts", {})
    return points + [("rank_seconds", (part,), seconds) for part, seconds in parts.items()]


def _of_findings(
    run_id: str, findings: Sequence[Mapping[str, Any]], hosts: Mapping[tuple[str, int], str]
) -> Iterator[_Point]:
    """Yield how many are open by severity, and the ranks that cost most."""
    severities = [str(body["severity"]) for body in findings]
    for severity in SEVERITIES:
        yield "open_findings", (severity,), severities.count(severity)
    named: dict[int, tuple[float, str]] = {}
    for body in sorted(findings, key=_cost, reverse=True):
        for rank in body["ranks"] if _cost(body) else ():
            if len(named) < WORST_RANKS:
                named.setdefault(rank, (_cost(body), str(body["kind"])))
    for rank, (cost, kind) in named.items():
        yield "rank_cost_ratio", (str(rank), hosts.get((run_id, rank), ""), kind), cost


def _cost(body: Mapping[str, Any]) -> float:
    """Return the share of the throughput that a finding costs; 0 where that is not known."""
    return float(body.get("cost_throughput_ratio") or 0.0)


def _runs(connection: sa.Connection) -> tuple[Sequence[sa.Row[Any]], int]:
    """Return the newest runs that are live or were a while ago, and how many there are."""
    table, now_ns = tables.run.c, time.time_ns()
    oldest = sa.case((table.status.in_(_OVER), now_ns - _OVER_NS), else_=now_ns - _LIVE_NS)
    where = (table.launcher != IMPORTED, table.received_ns >= oldest)
    total = connection.scalar(sa.select(sa.func.count()).select_from(tables.run).where(*where))
    rows = connection.execute(
        sa.select(tables.run).where(*where)
        .order_by(table.started_ns.desc(), table.run_id).limit(MAX_RUNS)
    ).all()  # fmt: skip
    return rows, int(total or 0)


def _ranks(connection: sa.Connection, silent_before_ns: Mapping[str, int]) -> dict[str, _Ranks]:
    """Count the ranks of the newest attempt of each run."""
    if not silent_before_ns:
        return {}
    ranks, runs = tables.rank.c, tables.run.c
    before = sa.case(dict(silent_before_ns), value=ranks.run_id)
    is_live = runs.status.not_in(_OVER)
    rows = connection.execute(
        sa.select(
            ranks.run_id,
            sa.func.count(),
            sa.func.sum(sa.case((is_live & silent_rank(before), 1), else_=0)),
            sa.func.sum(sa.case((ranks.ended_ns.is_not(None), 1), else_=0)),
        )
        .join(tables.run, (runs.run_id == ranks.run_id) & (runs.attempt == ranks.attempt))
        .where(ranks.run_id.in_(list(silent_before_ns)))
        .group_by(ranks.run_id)
    )
    return {run_id: _Ranks(known, int(silent), int(ended)) for run_id, known, silent, ended in rows}


def _lost(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, int]:
    table = tables.loss.c
    count = sa.func.sum(table.count)
    return _by_run(connection, sa.select(table.run_id, count), table.run_id, run_ids)


def _missing(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, int]:
    run_id = tables.producer.c.run_id
    return _by_run(connection, sa.select(run_id, NUM_MISSING), run_id, run_ids)


def _by_run(
    connection: sa.Connection,
    question: sa.Select[Any],
    run_id: sa.ColumnElement[str],
    run_ids: Sequence[str],
) -> dict[str, int]:
    rows = connection.execute(question.where(run_id.in_(run_ids)).group_by(run_id))
    return {name: int(value) for name, value in rows}


def _findings(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the bodies of the open findings of each run."""
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.run_id, table.body)
        .where(table.run_id.in_(run_ids), table.state != "recovered")
        .order_by(table.run_id, table.id)
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for run_id, body in rows:
        found.setdefault(run_id, []).append(json.loads(body))
    return found


def _hosts(
    connection: sa.Connection, findings: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[tuple[str, int], str]:
    """Return where the ranks are that findings with a cost name first."""
    ranks, runs = tables.rank.c, tables.run.c
    named = [
        (ranks.run_id == run_id) & ranks.rank.in_(body["ranks"][:WORST_RANKS])
        for run_id, bodies in findings.items()
        for body in bodies
        if _cost(body)
    ]
    if not named:
        return {}
    rows = connection.execute(
        sa.select(ranks.run_id, ranks.rank, ranks.host)
        .join(tables.run, (runs.run_id == ranks.run_id) & (runs.attempt == ranks.attempt))
        .where(sa.or_(*named))
    )
    return {(run_id, rank): host for run_id, rank, host in rows}
