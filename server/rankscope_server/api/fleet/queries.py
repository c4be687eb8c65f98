"""Reads what is stored about all runs together: rows of runs, ranks, findings, no chunk."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import capped, json_object, of_row
from rankscope_server.api.fleet.hosts import Named, Run, counts, hosts_over_runs, worst_host
from rankscope_server.api.fleet.schema import Fleet, FleetHost, LiveRun, SilentAgent
from rankscope_server.api.fleet.weeks import Spent, Use, by_week, monday_of
from rankscope_server.api.runs.queries import hosts_of, short_verdict, silent_rank
from rankscope_server.store import tables
from rankscope_server.store.projects import of_project
from rankscope_server.text import plural

MAX_LIVE = 100
MAX_SILENT = 100
MAX_HOSTS = 200
MAX_COMPARED = 200  # runs by which hosts are compared: their ranks and findings are read
MAX_SUMMED = 2_000  # runs in the weeks: of each one row is read
DAY_NS = 86_400 * 10**9
_RUNS_AT_ONCE = 500  # of one question: SQLite bounds the number of parameters
_OVER = ("ended", "failed")
_BAD = ("warning", "critical")


def fleet(
    connection: sa.Connection,
    project: str | None,
    num_weeks: int,
    now_ns: int,
    silent_before_ns: int,
) -> Fleet:
    """Return all runs of a project, or of all, together."""
    mine = of_project(tables.run, project)
    live, num_live, num_quiet = _live(connection, mine, now_ns)
    silent = _silent(connection, [run.run_id for run in live], silent_before_ns)
    since_ns = int(monday_of(now_ns).timestamp()) * 10**9 - (num_weeks - 1) * 7 * DAY_NS
    recent = [*mine, tables.run.c.started_ns >= since_ns, tables.run.c.launcher != IMPORTED]
    total = _count(connection, recent)
    hosts = _hosts(connection, recent)
    spent = _spent(connection, recent)
    return Fleet(
        text=_sentence(live, num_live, worst_host(hosts), len({one.host for one in silent})),
        live=live,
        live_capped=capped(len(live), num_live),
        num_quiet=num_quiet,
        silent=silent[:MAX_SILENT],
        silent_capped=capped(min(len(silent), MAX_SILENT), len(silent)),
        hosts=hosts[:MAX_HOSTS],
        hosts_capped=capped(min(len(hosts), MAX_HOSTS), len(hosts)),
        runs_capped=capped(min(total, MAX_COMPARED), total),
        weeks=by_week(spent, now_ns, num_weeks),
        weeks_capped=capped(len(spent), total),
    )


def _count(connection: sa.Connection, where: list[Any]) -> int:
    found = sa.select(sa.func.count()).select_from(tables.run).where(*where)
    return int(connection.scalar(found) or 0)


def _live(
    connection: sa.Connection, mine: list[Any], now_ns: int
) -> tuple[list[LiveRun], int, int]:
    """Return the live runs, those that need attention first; how many there are; how many quiet."""
    table = tables.run.c
    open_ones = [*mine, table.status.not_in(_OVER), table.launcher != IMPORTED]
    heard = table.received_ns >= now_ns - DAY_NS
    rows = connection.execute(
        sa.select(tables.run)
        .where(*open_ones, heard)
        .order_by(table.started_ns.desc(), table.run_id)
        .limit(MAX_LIVE)
    ).all()
    hosts = hosts_of(connection, [row.run_id for row in rows])
    found = [_live_run(row, len(hosts.get(row.run_id, {}))) for row in rows]
    found.sort(key=lambda run: not run.needs_attention)
    total = _count(connection, [*open_ones, heard])
    return found, total, _count(connection, open_ones) - total


def _live_run(row: sa.Row[Any], num_hosts: int) -> LiveRun:
    verdict, answer = short_verdict(json_object(row.verdict)), json_object(row.answer) or {}
    stored = json_object(row.cost)
    wall = stored["wall_seconds"] if stored is not None else 0.0
    is_bad = verdict is not None and verdict.severity in _BAD
    return of_row(
        LiveRun,
        row,
        name=row.name or row.run_id,
        sentence=str(answer.get("text", "")) or (verdict.what if verdict is not None else ""),
        needs_attention=is_bad or row.status in ("stuck", "silent"),
        world_size=row.world_size or None,
        num_hosts=num_hosts,
        verdict=verdict,
        productive_share=stored["parts"]["productive"] / wall if wall > 0 else None,
    )


def _silent(
    connection: sa.Connection, run_ids: list[str], silent_before_ns: int
) -> list[SilentAgent]:
    """Return the hosts with ranks of the newest attempt that send nothing, longest first."""
    ranks, runs = tables.rank.c, tables.run.c
    is_silent = silent_rank(silent_before_ns)
    num_silent = sa.func.sum(sa.case((is_silent, 1), else_=0))
    rows = connection.execute(
        sa.select(
            ranks.run_id, ranks.host, sa.func.count().label("num_ranks"),
            num_silent.label("num_silent"),
            sa.func.max(sa.case((is_silent, ranks.received_ns))).label("received_ns"),
        )
        .join(tables.run, (runs.run_id == ranks.run_id) & (runs.attempt == ranks.attempt))
        .where(ranks.run_id.in_(run_ids))
        .group_by(ranks.run_id, ranks.host)
        .having(num_silent > 0)
        .order_by("received_ns", ranks.run_id, ranks.host)
    )  # fmt: skip
    return [
        of_row(SilentAgent, row, num_silent=int(row.num_silent), host=row.host or "unknown")
        for row in rows
    ]


def _hosts(connection: sa.Connection, recent: list[Any]) -> list[FleetHost]:
    table = tables.run.c
    rows = connection.execute(
        sa.select(table.run_id, table.name, table.started_ns)
        .where(*recent)
        .order_by(table.started_ns.desc(), table.run_id)
        .limit(MAX_COMPARED)
    ).all()
    run_ids = [row.run_id for row in rows]
    hosts = hosts_of(connection, run_ids)
    runs = [
        Run(
            row.run_id, row.name or row.run_id, row.started_ns,
            frozenset(hosts.get(row.run_id, {})),
        )
        for row in rows
    ]  # fmt: skip
    return hosts_over_runs(runs, _named(connection, run_ids))


def _named(connection: sa.Connection, run_ids: list[str]) -> list[Named]:
    """Return the findings of weight that accuse hosts, whether or not they still hold."""
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.id, table.run_id, table.body).where(table.run_id.in_(run_ids))
    )
    found = []
    for id, run_id, text in rows:
        body = json_object(text) or {}
        kind, hosts = str(body.get("kind", "")), tuple(body.get("hosts") or ())
        if hosts and counts(kind) and body.get("severity") in _BAD:
            found.append(Named(id, run_id, kind, str(body.get("what", "")), hosts))
    return found


def _spent(connection: sa.Connection, recent: list[Any]) -> list[Spent]:
    table = tables.run.c
    rows = connection.execute(
        sa.select(table.run_id, table.started_ns, table.cost, table.project, table.status)
        .where(*recent)
        .order_by(table.started_ns.desc(), table.run_id)
        .limit(MAX_SUMMED)
    ).all()
    uses = _uses(connection, [row.run_id for row in rows])
    return [
        Spent(
            row.started_ns, json_object(row.cost), row.project, row.status not in _OVER,
            uses.get((row.run_id, "gpu"), Use()), uses.get((row.run_id, "host"), Use()),
        )
        for row in rows
    ]  # fmt: skip


def _uses(connection: sa.Connection, run_ids: list[str]) -> dict[tuple[str, str], Use]:
    """Return how busy the GPUs and the processors of the hosts of each run were."""
    table = tables.sample_span.c
    found: dict[tuple[str, str], Use] = {}
    for at in range(0, len(run_ids), _RUNS_AT_ONCE):
        rows = connection.execute(
            sa.select(table.run_id, table.kind, sa.func.sum(table.known_us),
                      sa.func.sum(table.busy_us))
            .where(
                table.run_id.in_(run_ids[at : at + _RUNS_AT_ONCE]),
                table.kind.in_(("gpu", "host")),
            )
            .group_by(table.run_id, table.kind)
        )  # fmt: skip
        found |= {(run_id, kind): Use(int(known), int(busy)) for run_id, kind, known, busy in rows}
    return found


def _sentence(live: list[LiveRun], num_live: int, host: FleetHost | None, num_silent: int) -> str:
    bad = sum(run.needs_attention for run in live)
    if not num_live:
        text = "No run is live"
    elif bad:
        needs = "needs" if bad == 1 else "need"
        text = f"{bad} of {plural(num_live, 'live run')} {needs} attention"
    else:
        text = f"{plural(num_live, 'live run')}, and none needs attention"
    if num_silent:
        text += f"; ranks of {plural(num_silent, 'host')} are silent"
    if host is not None:
        text += f"; {host.host} was slow in {host.num_slow} of {plural(host.num_runs, 'run')}"
    return text
