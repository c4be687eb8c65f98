"""Reads from the store what rules look at; keeps in memory what the store does not hold."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.alerts.seen import (
    OVER,
    Seen,
    SeenCollector,
    SeenFinding,
    SeenLoss,
    SeenRank,
    SeenRun,
    SeenServer,
)
from rankscope_server.alerts.store import runs_of_open
from rankscope_server.prices import NO_PRICES, PriceList
from rankscope_server.store import tables
from rankscope_server.store.disk import database_bytes

_MOST_RUNS = 500  # that are read in one look, the newest news first
_OVER_NS = 600 * 10**9
DEAF_RATIO = 0.5  # batches that wait in the queue of the store are not heard yet
DEAF_SECONDS = 5.0  # a store that takes so long to write says nothing of who sends


@dataclass(frozen=True, slots=True)
class Delays:
    """What keeps this server from knowing what is so now."""

    analysis_seconds: Callable[[], float]  # for how long stored data waits for a look
    intake_seconds: Callable[[], float]  # for how long what was sent waits to be stored
    queue_ratio: Callable[[], float]  # how full the queue of the store is, 0-1

    def behind_seconds(self) -> float:
        """Return how old what is seen may be."""
        return max(self.analysis_seconds(), self.intake_seconds())

    def is_deaf(self) -> bool:
        """Return whether ranks may have sent what this server has not heard yet."""
        return self.queue_ratio() > DEAF_RATIO or self.intake_seconds() > DEAF_SECONDS


@dataclass(slots=True)
class Reader:
    """Makes what is seen, again and again; one thread uses it."""

    horizon_seconds: float  # a run without news for so long is not live
    pause_seconds: float  # between two readings
    delays: Delays
    store_path: str  # of an embedded database, else empty
    hearing_since_ns: int = 0
    prices: PriceList = NO_PRICES
    _read: float = 0.0  # when the last reading was, on the monotonic clock
    _steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    _bodies: dict[int, tuple[int, SeenFinding]] = field(default_factory=dict)

    def read(
        self, connection: sa.Connection, now_ns: int, store_seconds: float,
        silence_seconds: float | None, *, with_spent: bool = False, with_losses: bool = False,
        with_size: bool = False,
    ) -> Seen:  # fmt: skip
        """Return what is so now.

        `store_seconds` is how long the store took to write since the last reading,
        `silence_seconds` the least that a rule calls silence: ranks are read where that may be.
        `with_spent`, `with_losses`, `with_size`: a rule asks what runs have cost, what of them is
        lost, how large the database is.
        """
        self._note_deafness(now_ns, store_seconds)
        named = runs_of_open(connection)
        runs = self._runs(connection, now_ns, named)
        shown = {row.run_id for row in runs}
        self._steps = {run_id: at for run_id, at in self._steps.items() if run_id in shown}
        findings = self._findings(connection, shown, named, now_ns)
        live = {row.run_id for row in runs if row.status not in OVER}
        collectors = _by_run(connection, _COLLECTORS, live) if silence_seconds else {}
        before_ns = now_ns - int((silence_seconds or 0) * 1e9)
        quiet = _quiet_runs(connection, live, collectors, before_ns) if silence_seconds else set()
        ranks = _by_run(connection, _RANKS, live & (quiet | named))
        losses = _losses(connection, live) if with_losses else {}
        spent = self._spent(connection, live) if with_spent else {}
        return Seen(
            now_ns=now_ns,
            hearing_since_ns=self.hearing_since_ns,
            runs=tuple(
                replace(
                    self._run(row, now_ns, findings, ranks, collectors, losses),
                    **spent.get(row.run_id, {}),
                )
                for row in runs
            ),
            server=SeenServer(
                behind_seconds=self.delays.behind_seconds(),
                queue_ratio=self.delays.queue_ratio(),
                disk_free_bytes=free_bytes(self.store_path),
                database_bytes=database_bytes(connection) if with_size else None,
            ),
        )  # fmt: skip

    def _note_deafness(self, now_ns: int, store_seconds: float) -> None:
        """Begin to count silence anew where this server could not hear: stopped, full, no store."""
        now = time.monotonic()
        was_away = now - self._read > 3 * self.pause_seconds + DEAF_SECONDS
        if was_away or store_seconds > DEAF_SECONDS or self.delays.is_deaf():
            self.hearing_since_ns = now_ns
        self._read = now

    def _runs(self, connection: sa.Connection, now_ns: int, named: set[str]) -> list[sa.Row[Any]]:
        table = tables.run.c
        since_ns = now_ns - int(self.horizon_seconds * 1e9)
        found: sa.Result[Any] = connection.execute(
            sa.select(
                table.run_id, table.name, table.project, table.tags, table.status, table.step,
                table.attempt, table.received_ns, table.refused,
            )
            .where(
                table.launcher != IMPORTED,
                sa.or_(table.received_ns > since_ns, table.run_id.in_(list(named)[:_MOST_RUNS])),
            )
            .order_by(table.received_ns.desc())
            .limit(_MOST_RUNS)
        )  # fmt: skip
        return list(found.all())

    def _run(
        self, row: sa.Row[Any], now_ns: int, findings: dict[str, list[SeenFinding]],
        ranks: dict[str, list[Any]], collectors: dict[str, list[Any]], losses: dict[str, SeenLoss],
    ) -> SeenRun:  # fmt: skip
        step, since_ns = self._steps.get(row.run_id, (-1, 0))
        if step != row.step:
            since_ns = now_ns
            self._steps[row.run_id] = (row.step, now_ns)
        return SeenRun(
            run_id=row.run_id, name=row.name, project=row.project, tags=_tags(row.tags),
            status=row.status,
            is_live=now_ns - row.received_ns < self.horizon_seconds * 1e9,
            step=row.step, stepped_ns=since_ns, findings=tuple(findings.get(row.run_id, ())),
            ranks=tuple(
                SeenRank(one.rank, one.host, one.received_ns or 0, one.ended_ns is not None)
                for one in ranks.get(row.run_id, ())
                if one.attempt == row.attempt
            ),
            collectors=tuple(
                SeenCollector(one.host, one.received_ns)
                for one in collectors.get(row.run_id, ())
                if one.host
            ),
            lost=replace(losses.get(row.run_id, SeenLoss()), refused=row.refused or 0),
        )  # fmt: skip

    def _spent(self, connection: sa.Connection, run_ids: set[str]) -> dict[str, dict[str, Any]]:
        """Return what runs have cost up to now, as far as their analysis says."""
        run, rank = tables.run.c, tables.rank.c
        rows = connection.execute(
            sa.select(run.run_id, run.cost).where(
                run.run_id.in_(list(run_ids)), run.cost.is_not(None)
            )
        ).all()
        hosts: dict[str, list[str]] = {}
        if self.prices.rows:
            found = connection.execute(
                sa.select(rank.run_id, rank.host)
                .join(tables.run, (run.run_id == rank.run_id) & (run.attempt == rank.attempt))
                .where(rank.run_id.in_([row.run_id for row in rows]))
            )
            for run_id, host in found:
                hosts.setdefault(run_id, []).append(host)
        return {
            row.run_id: {
                "spent_rank_hours": _decode_cost(row.cost).wall_seconds / 3600.0,
                "rate": self.prices.rate_of(hosts.get(row.run_id, [])),
            }
            for row in rows
        }

    def _findings(
        self, connection: sa.Connection, run_ids: set[str], named: set[str], now_ns: int
    ) -> dict[str, list[SeenFinding]]:
        """Return the findings of runs; only what changed since the last reading is decoded.

        Those that are over for a while are left out where no alert of the run is open.
        """
        table = tables.finding
        is_news = sa.or_(
            table.c.state != "recovered",
            table.c.updated_ns > now_ns - _OVER_NS,
            table.c.run_id.in_(list(named)[:_MOST_RUNS]),
        )
        rows = connection.execute(
            sa.select(table.c.id, table.c.run_id, table.c.updated_ns).where(
                table.c.run_id.in_(list(run_ids)), is_news
            )
        ).all()
        old = {row.id for row in rows if self._bodies.get(row.id, (0, 0))[0] == row.updated_ns}
        new = [row.id for row in rows if row.id not in old]
        kept = {number: self._bodies[number] for number in old}
        for at in range(0, len(new), 500):
            chosen = sa.select(table).where(table.c.id.in_(new[at : at + 500]))
            for row in connection.execute(chosen):
                kept[row.id] = (row.updated_ns, seen_finding(row))
        self._bodies = kept
        found: dict[str, list[SeenFinding]] = {}
        for row in rows:
            if row.id in kept:
                found.setdefault(row.run_id, []).append(kept[row.id][1])
        return found


def seen_finding(row: sa.Row[Any]) -> SeenFinding:
    """Return what rules look at of a stored finding."""
    body: dict[str, Any] = msgspec.json.decode(row.body or "{}")
    return SeenFinding(
        id=row.id, kind=str(body.get("kind", "")), severity=body.get("severity", "info"),
        confidence=float(body.get("confidence") or 0.0), is_over=row.state == "recovered",
        is_explained=body.get("explained_by") is not None, opened_ns=row.opened_ns,
        ranks=tuple(body.get("ranks") or ()), what=str(body.get("what", "")),
        why=str(body.get("why", "")), next=str(body.get("next", "")),
        throughput_ratio=body.get("cost_throughput_ratio"),
        rank_hours_per_day=body.get("cost_rank_hours_per_day"),
    )  # fmt: skip


class _StoredCost(msgspec.Struct):
    """Of what a run cost only how long all of its ranks took."""

    wall_seconds: float


_decode_cost = msgspec.json.Decoder(_StoredCost).decode
_rank, _producer = tables.rank.c, tables.producer.c
_RANKS = sa.select(
    _rank.run_id, _rank.attempt, _rank.rank, _rank.host, _rank.received_ns, _rank.ended_ns
)
_COLLECTORS = sa.select(  # a collector that was started again is the same one
    _producer.run_id, _producer.host, sa.func.max(_producer.received_ns).label("received_ns")
).group_by(_producer.run_id, _producer.host)
_HEARD = (
    sa.select(_rank.run_id, sa.func.min(_rank.received_ns))
    .join(
        tables.run, (tables.run.c.run_id == _rank.run_id) & (tables.run.c.attempt == _rank.attempt)
    )
    .where(_rank.ended_ns.is_(None))
    .group_by(_rank.run_id)
)


def _losses(connection: sa.Connection, run_ids: set[str]) -> dict[str, SeenLoss]:
    """Return what agents of runs dropped, and what did not arrive."""
    missing = _producer.last_sequence - _producer.first_sequence + 1 - _producer.received
    batches = {
        run_id: int(number)
        for run_id, number in connection.execute(
            sa.select(_producer.run_id, sa.func.sum(missing))
            .where(_producer.run_id.in_(list(run_ids)))
            .group_by(_producer.run_id)
            .having(sa.func.sum(missing) > 0)
        )
    }
    loss = tables.loss.c
    found: dict[str, SeenLoss] = {}
    rows = connection.execute(
        sa.select(loss.run_id, loss.host, loss.source, loss.reason, loss["count"])
        .where(loss.run_id.in_(list(run_ids)), loss["count"] > 0)
        .order_by(loss["count"])
    )
    for run_id, host, source, reason, count in rows:
        before = found.get(run_id, SeenLoss())
        worst = f"most on {host}: {count:,} {source}, {reason}"
        found[run_id] = SeenLoss(records=before.records + int(count), worst=worst)
    return {
        run_id: replace(found.get(run_id, SeenLoss()), batches=batches.get(run_id, 0))
        for run_id in {*found, *batches}
    }


def _quiet_runs(
    connection: sa.Connection, run_ids: set[str], collectors: dict[str, list[Any]], before_ns: int
) -> set[str]:
    """Return the runs of which a rank or a collector was not heard since some time."""
    heard = connection.execute(_HEARD.where(_rank.run_id.in_(list(run_ids))))
    quiet = {run_id for run_id, least_ns in heard if (least_ns or 0) < before_ns}
    return quiet | {
        run_id
        for run_id, rows in collectors.items()
        if any(r.received_ns < before_ns for r in rows)
    }


def _by_run(
    connection: sa.Connection, query: sa.Select[Any], run_ids: set[str]
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    chosen = query.where(query.selected_columns["run_id"].in_(list(run_ids)))
    for row in connection.execute(chosen):
        found.setdefault(row.run_id, []).append(row)
    return found


def _tags(text: str) -> dict[str, str]:
    tags = json.loads(text or "{}")
    return {str(name): str(value) for name, value in tags.items()}


def free_bytes(path: str) -> int | None:
    """Return how much the server's user may still write beside a file; None: not known."""
    try:
        found = os.statvfs(os.path.dirname(path) or ".") if path else None
    except OSError:
        return None
    return None if found is None else found.f_bavail * found.f_frsize
