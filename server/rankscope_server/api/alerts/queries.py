"""Alerts, rules, channels and deliveries as answers."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope_server.alerts import store
from rankscope_server.alerts.channels import place_of, shown
from rankscope_server.alerts.message import Message
from rankscope_server.alerts.rules import OnDisk
from rankscope_server.alerts.store import StoredChannel, StoredRule
from rankscope_server.answers import Capped, capped, of_row, to_ms
from rankscope_server.api.alerts.schema import (
    AlertRow,
    Alerts,
    ChannelRow,
    Channels,
    Deliveries,
    DeliveryRow,
    RuleRow,
    Rules,
)
from rankscope_server.problems import not_found
from rankscope_server.store import tables

MAX_LIMIT = 500


def alerts(
    connection: sa.Connection, run_id: str, state: str, limit: int, project: str | None = None
) -> Alerts:
    """Return alerts, open ones first: of all runs and the server, or of a run, or of a project."""
    table, run = tables.alert.c, tables.run.c
    where: list[sa.ColumnElement[bool]] = [table.run_id == run_id] if run_id else []
    if project is not None:
        where.append(table.run_id.in_(sa.select(run.run_id).where(run.project == project)))
    wanted = [*where, table.state == state] if state else where
    rows = connection.execute(
        sa.select(tables.alert)
        .where(*wanted)
        .order_by((table.state == "open").desc(), table.id.desc())
        .limit(limit)
    ).all()
    sent = _messages(connection, [row.id for row in rows])
    return Alerts(
        num_open=_count(connection, tables.alert, *where, table.state == "open"),
        alerts=[_alert(row, sent.get(row.id, {})) for row in rows],
        capped=capped(len(rows), _count(connection, tables.alert, *wanted)),
    )


def alert(connection: sa.Connection, alert_id: int) -> AlertRow:
    """Return one alert. Raises Problem 404."""
    table = tables.alert
    row = connection.execute(sa.select(table).where(table.c.id == alert_id)).first()
    if row is None:
        raise not_found(f"no alert {alert_id}", "see /api/v1/alerts", "id")
    return _alert(row, _messages(connection, [alert_id]).get(alert_id, {}))


def _alert(row: sa.Row[Any], sent: dict[str, int]) -> AlertRow:
    return of_row(
        AlertRow, row, num_sent=sent.get("sent", 0), num_waiting=sent.get("pending", 0),
        num_given_up=sent.get("given_up", 0),
    )  # fmt: skip


def _messages(connection: sa.Connection, ids: list[int]) -> dict[int, dict[str, int]]:
    table = tables.alert_delivery.c
    rows = connection.execute(
        sa.select(table.alert_id, table.state, sa.func.count())
        .where(table.alert_id.in_(ids))
        .group_by(table.alert_id, table.state)
    )
    found: dict[int, dict[str, int]] = {}
    for alert_id, state, number in rows:
        found.setdefault(alert_id, {})[state] = number
    return found


def rules(connection: sa.Connection) -> Rules:
    """Return all rules."""
    return Rules(rules=[_rule(connection, one) for one in store.rules(connection)])


def rule(connection: sa.Connection, rule_id: int) -> RuleRow:
    """Return one rule. Raises Problem 404."""
    for one in store.rules(connection):
        if one.id == rule_id:
            return _rule(connection, one)
    raise no_rule(rule_id)


_DATABASE_DISK = (
    "never here: the disk is that of the database, which this server does not see; "
    "watch it where PostgreSQL runs, or give the rule a size of the database"
)


def no_rule(rule_id: int) -> Exception:
    """Return the problem of a rule that does not exist."""
    return not_found(f"no rule {rule_id}", "see /api/v1/alerts/rules", "id")


def _rule(connection: sa.Connection, one: StoredRule) -> RuleRow:
    when, is_elsewhere = one.rule.when, connection.dialect.name != "sqlite"
    is_blind = isinstance(when, OnDisk) and is_elsewhere and not when.database_bytes
    return RuleRow(
        id=one.id, name=one.name, is_from_file=one.is_from_file,
        never=_DATABASE_DISK if is_blind else "",
        **msgspec.structs.asdict(one.rule),
    )  # fmt: skip


def channels(connection: sa.Connection) -> Channels:
    """Return all channels."""
    table = tables.alert_delivery
    newest = (
        sa.select(sa.func.max(table.c.id))
        .where(table.c.state.in_(("sent", "given_up", "dropped")))
        .group_by(table.c.channel_id)
    )
    last = {
        row.channel_id: row
        for row in connection.execute(sa.select(table).where(table.c.id.in_(newest)))
    }
    return Channels(
        channels=[_channel(one, last.get(one.id)) for one in store.channels(connection)]
    )


def channel(connection: sa.Connection, channel_id: int) -> ChannelRow:
    """Return one channel. Raises Problem 404."""
    for one in channels(connection).channels:
        if one.id == channel_id:
            return one
    raise no_channel(channel_id)


def no_channel(channel_id: int) -> Exception:
    """Return the problem of a channel that does not exist."""
    return not_found(f"no channel {channel_id}", "see /api/v1/alerts/channels", "id")


def _channel(one: StoredChannel, last: sa.Row[Any] | None) -> ChannelRow:
    target = shown(one.target)
    return ChannelRow(
        id=one.id, name=one.name, kind=target["kind"], place=place_of(one.target), target=target,
        quiet=one.quiet, is_enabled=one.is_enabled, is_from_file=one.is_from_file,
        last_state=None if last is None else last.state,
        last_ms=None if last is None else to_ms(last.ended_ns),
        last_note="" if last is None else last.note,
    )  # fmt: skip


def deliveries(
    connection: sa.Connection, state: str, channel_id: int | None, limit: int
) -> Deliveries:
    """Return messages, the newest first."""
    table = tables.alert_delivery.c
    where = [table.state == state] if state else []
    where += [] if channel_id is None else [table.channel_id == channel_id]
    rows = connection.execute(
        sa.select(tables.alert_delivery).where(*where).order_by(table.id.desc()).limit(limit)
    ).all()
    total = _count(connection, tables.alert_delivery, *where)
    cut: Capped | None = capped(len(rows), total)
    return Deliveries(deliveries=[_delivery(row) for row in rows], capped=cut)


def delivery(connection: sa.Connection, delivery_id: int) -> DeliveryRow:
    """Return one message. Raises Problem 404."""
    table = tables.alert_delivery
    row = connection.execute(sa.select(table).where(table.c.id == delivery_id)).first()
    if row is None:
        raise not_found(f"no message {delivery_id}", "see /api/v1/alerts/deliveries", "id")
    return _delivery(row)


def _delivery(row: sa.Row[Any]) -> DeliveryRow:
    message = msgspec.json.decode(row.message, type=Message)
    return of_row(DeliveryRow, row, severity=message.severity, what=message.title)


def num_open(connection: sa.Connection) -> int:
    """Return how many alerts are open."""
    return _count(connection, tables.alert, tables.alert.c.state == "open")


def _count(connection: sa.Connection, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    query = sa.select(sa.func.count()).select_from(table).where(*where)
    return int(connection.scalar(query) or 0)
