"""Channels, rules, alerts and deliveries in the store.

A delivery is stored in the transaction that changes its alert, and is sent afterwards: a server
that is killed in between sends it when it starts again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope_server.alerts import channels as kinds
from rankscope_server.alerts.changes import Change, OpenAlert
from rankscope_server.alerts.channels import AnyTarget, Channel
from rankscope_server.alerts.evaluate import Firing
from rankscope_server.alerts.message import Message
from rankscope_server.alerts.quiet import QuietHours
from rankscope_server.alerts.rules import RefusedError, Rule
from rankscope_server.store import tables
from rankscope_server.store.unit import Unit

MAX_WAITING = 1_000  # messages of a channel; more are dropped, and shown as dropped
ALERTS_KEPT, DELIVERIES_KEPT = 5_000, 20_000  # of those that are over
MAX_RULES, MAX_CHANNELS = 200, 100
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredChannel:
    """A channel with its secrets. Its target must not be logged."""

    id: int
    name: str
    target: AnyTarget
    quiet: QuietHours | None
    is_enabled: bool
    is_from_file: bool = False


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule and its name."""

    id: int
    name: str
    rule: Rule
    is_from_file: bool = False


# --- channels and rules


def channels(connection: sa.Connection) -> list[StoredChannel]:
    """Return all channels."""
    table = tables.alert_channel
    return [_channel(row) for row in connection.execute(sa.select(table).order_by(table.c.id))]


def channel(connection: sa.Connection, channel_id: int) -> StoredChannel | None:
    """Return a channel."""
    table = tables.alert_channel
    row = connection.execute(sa.select(table).where(table.c.id == channel_id)).first()
    return None if row is None else _channel(row)


def _channel(row: sa.Row[Any]) -> StoredChannel:
    quiet = msgspec.json.decode(row.quiet, type=QuietHours | None)
    return StoredChannel(
        row.id, row.name, kinds.join(row.body, row.secrets), quiet, bool(row.is_enabled),
        bool(row.is_from_file),
    )  # fmt: skip


def put_channel(unit: Unit, given: Channel, channel_id: int | None = None) -> int | None:
    """Store a channel, a new one without an id; return its id, None where there is none.

    Raises RefusedError.
    """
    table, old = tables.alert_channel, None
    if channel_id is not None:
        old = channel(unit.connection, channel_id)
        if old is None:
            return None
        _refuse_of_file(unit, table, channel_id)
    elif _count(unit, table) >= MAX_CHANNELS:
        raise RefusedError("name", f"there are {MAX_CHANNELS} channels", "delete one", 409)
    target = kinds.with_secrets(given.target, old.target if old else None)
    kinds.check(target)
    return _put(unit, table, _channel_values(unit, given, target), channel_id)


def _channel_values(unit: Unit, given: Channel, target: AnyTarget) -> dict[str, Any]:
    body, secrets = kinds.split(target)
    return {
        "name": given.name, "kind": msgspec.to_builtins(target)["kind"], "body": body,
        "secrets": secrets, "quiet": _encode(given.quiet).decode(),
        "is_enabled": int(given.is_enabled), "updated_ns": unit.now_ns,
    }  # fmt: skip


def rules(connection: sa.Connection) -> list[StoredRule]:
    """Return all rules."""
    table = tables.alert_rule
    return [
        StoredRule(
            row.id, row.name, msgspec.json.decode(row.body, type=Rule), bool(row.is_from_file)
        )
        for row in connection.execute(sa.select(table).order_by(table.c.id))
    ]


def put_rule(unit: Unit, name: str, rule: Rule, rule_id: int | None = None) -> int | None:
    """Store a rule, a new one without an id; return its id, None where there is none.

    Raises RefusedError.
    """
    table = tables.alert_rule
    if rule_id is not None and not _exists(unit, table, rule_id):
        return None
    if rule_id is not None:
        _refuse_of_file(unit, table, rule_id)
    elif _count(unit, table) >= MAX_RULES:
        raise RefusedError("name", f"there are {MAX_RULES} rules", "delete one", 409)
    return _put(unit, table, _rule_values(unit, name, rule), rule_id)


def _rule_values(unit: Unit, name: str, rule: Rule) -> dict[str, Any]:
    return {"name": name, "body": _encode(rule).decode(), "updated_ns": unit.now_ns}


def delete(unit: Unit, table: sa.Table, row_id: int) -> bool:
    """Delete a channel or a rule; return whether it was there. Of a channel nothing waits then.

    Raises RefusedError where it is from the server's file.
    """
    _refuse_of_file(unit, table, row_id)
    return _delete(unit, table, row_id)


def _delete(unit: Unit, table: sa.Table, row_id: int) -> bool:
    if table is tables.alert_channel:
        _end_waiting(
            unit, tables.alert_delivery.c.channel_id == row_id, "dropped", "its channel is deleted"
        )
    return bool(unit.connection.execute(sa.delete(table).where(table.c.id == row_id)).rowcount)


def put_file(
    unit: Unit, channels: Sequence[Channel], rules: Mapping[str, tuple[Rule, Sequence[str]]]
) -> None:
    """Store the channels and rules of the server's file, and delete those that it had before.

    Rules come with the names of their channels. One of the same name that a person made becomes
    the file's.
    """
    of_file = {"is_from_file": 1}
    ids: dict[str, int] = {}
    table = tables.alert_channel
    for one in channels:
        values = _channel_values(unit, one, one.target) | of_file
        ids[one.name] = _put(unit, table, values, _id_of(unit, table, one.name))
    _delete_others(unit, table, ids)
    table = tables.alert_rule
    for name, (rule, names) in rules.items():
        chosen = msgspec.structs.replace(rule, channels=[ids[one] for one in names])
        values = _rule_values(unit, name, chosen) | of_file
        _put(unit, table, values, _id_of(unit, table, name))
    _delete_others(unit, table, rules)


def _id_of(unit: Unit, table: sa.Table, name: str) -> int | None:
    return unit.connection.scalar(sa.select(table.c.id).where(table.c.name == name))


def _delete_others(unit: Unit, table: sa.Table, names: Iterable[str]) -> None:
    of_file = table.c.is_from_file == 1
    query = sa.select(table.c.id).where(of_file, table.c.name.not_in(list(names)))
    for row_id in list(unit.connection.scalars(query)):
        _delete(unit, table, row_id)


def _refuse_of_file(unit: Unit, table: sa.Table, row_id: int) -> None:
    if unit.connection.scalar(sa.select(table.c.is_from_file).where(table.c.id == row_id)):
        raise RefusedError(
            "id", "it is from the file of the server", "change it there and start the server again",
            409,
        )  # fmt: skip


def _put(unit: Unit, table: sa.Table, values: dict[str, Any], row_id: int | None) -> int:
    taken = unit.connection.scalar(
        sa.select(table.c.id).where(table.c.name == values["name"], table.c.id != (row_id or 0))
    )
    if taken is not None:
        what = f"{values['name']!r} is the name of another one"
        raise RefusedError("name", what, "choose another name", 409)
    if row_id is not None:
        unit.connection.execute(sa.update(table).where(table.c.id == row_id).values(values))
        return row_id
    done = unit.connection.execute(sa.insert(table).values(values | {"created_ns": unit.now_ns}))
    return int(done.inserted_primary_key[0])  # type: ignore[index]


def _exists(unit: Unit, table: sa.Table, row_id: int) -> bool:
    found = unit.connection.scalar(sa.select(table.c.id).where(table.c.id == row_id))
    return found is not None


def _count(unit: Unit, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    query = sa.select(sa.func.count()).select_from(table).where(*where)
    return int(unit.connection.scalar(query) or 0)


# --- alerts


def open_alerts(connection: sa.Connection) -> dict[str, OpenAlert]:
    """Return what is open, by rule and subject; muted ones are those that a person closed."""
    table = tables.alert
    rows = connection.execute(sa.select(table).where(table.c.open_key.is_not(None)))
    return {
        row.open_key: OpenAlert(
            id=row.id, severity=row.severity, facts=tuple(json.loads(row.facts)),
            notified_ns=row.notified_ns, is_muted=row.state == "closed",
        )
        for row in rows
    }  # fmt: skip


def runs_of_open(connection: sa.Connection) -> set[str]:
    """Return the runs of which an alert is open."""
    table = tables.alert.c
    return set(
        connection.scalars(
            sa.select(table.run_id).where(table.open_key.is_not(None), table.run_id != "")
        )
    )


def key_of(rule_id: int, subject: str) -> str:
    """Return what makes two alerts the same problem."""
    return f"{rule_id}/{subject}"


def store_change(
    unit: Unit, rule: StoredRule | None, key: str, change: Change, known: OpenAlert | None
) -> None:
    """Store what becomes of an alert, and the messages about it."""
    if change.event == "opened":
        if rule is not None and change.firing is not None:
            _open(unit, rule, key, change.firing)
        return
    if known is None:
        return
    table, firing = tables.alert, change.firing
    now = unit.connection.execute(sa.select(table).where(table.c.id == known.id)).first()
    if now is None or now.open_key is None:
        return
    is_muted = now.state == "closed"  # a person may have closed it since the look
    values: dict[str, Any] = {"updated_ns": unit.now_ns, "notified_ns": unit.now_ns}
    if firing is not None:
        values |= _texts(firing)
    else:
        values |= {
            "state": change.event, "open_key": None, "ended_ns": unit.now_ns,
            "end_reason": change.reason,
        }  # fmt: skip
        if is_muted:
            del values["state"], values["end_reason"]
    unit.connection.execute(sa.update(table).where(table.c.id == known.id).values(values))
    if not (change.is_silent or is_muted):
        row = unit.connection.execute(sa.select(table).where(table.c.id == known.id)).one()
        _queue(unit, row, change, _channels_of(unit, known.id))


def _open(unit: Unit, rule: StoredRule, key: str, firing: Firing) -> None:
    table = tables.alert
    if unit.connection.scalar(sa.select(table.c.id).where(table.c.open_key == key)) is not None:
        return  # it is open since the last look
    done = unit.connection.execute(
        sa.insert(table).values(
            uid=uuid.uuid4().hex, open_key=key, rule_id=rule.id, rule_name=rule.name,
            subject=key.partition("/")[2], run_id=firing.run_id, run_name=firing.run_name,
            state="open", opened_ns=unit.now_ns, updated_ns=unit.now_ns, notified_ns=unit.now_ns,
            **_texts(firing),
        )
    )  # fmt: skip
    alert_id = done.inserted_primary_key[0]  # type: ignore[index]
    row = unit.connection.execute(sa.select(table).where(table.c.id == alert_id)).one()
    wanted = [
        one
        for one in channels(unit.connection)
        if one.is_enabled and (not rule.rule.channels or one.id in rule.rule.channels)
    ]
    _queue(unit, row, Change("opened", firing), wanted)


def _texts(firing: Firing) -> dict[str, Any]:
    return {
        "severity": firing.severity, "what": firing.what, "why": firing.why, "next": firing.next,
        "path": firing.path, "facts": json.dumps(firing.facts),
    }  # fmt: skip


def _channels_of(unit: Unit, alert_id: int) -> list[StoredChannel]:
    """Return the channels that heard of an alert: they hear of its end too."""
    table = tables.alert_delivery.c
    ids = set(
        unit.connection.scalars(
            sa.select(table.channel_id).where(table.alert_id == alert_id, table.state != "dropped")
        )
    )
    return [one for one in channels(unit.connection) if one.id in ids]


def _queue(unit: Unit, row: sa.Row[Any], change: Change, wanted: Sequence[StoredChannel]) -> None:
    for one in wanted:
        message = Message(
            id=uuid.uuid4().hex, event=change.event, alert=row.uid, rule=row.rule_name,
            severity=row.severity, run_id=row.run_id, run_name=row.run_name, what=row.what,
            why=row.why, next=row.next, note=change.reason, path=row.path,
            opened_ms=row.opened_ns / 1e6, time_ms=unit.now_ns / 1e6,
        )  # fmt: skip
        queue_message(unit, one, message, alert_id=row.id)


def queue_message(
    unit: Unit, one: StoredChannel, message: Message, *, alert_id: int = 0, state: str = "pending"
) -> int:
    """Store a message that is to be sent; return the id of its delivery."""
    table, note = tables.alert_delivery, ""
    mine = (table.c.channel_id == one.id) & (table.c.state == "pending")
    if state == "pending" and _count(unit, table, mine) >= MAX_WAITING:
        state, note = "dropped", f"{MAX_WAITING:,} messages wait for this channel already"
    done = unit.connection.execute(
        sa.insert(table).values(
            uid=message.id, alert_id=alert_id, channel_id=one.id, channel_name=one.name,
            event=message.event, message=_encode(message).decode(), state=state, note=note,
            created_ns=unit.now_ns, next_ns=unit.now_ns,
            ended_ns=None if state == "pending" else unit.now_ns,
        )
    )  # fmt: skip
    return int(done.inserted_primary_key[0])  # type: ignore[index]


def close_alert(unit: Unit, alert_id: int) -> bool:
    """Close an open alert for a person; it stays muted until its problem is over.

    Return whether there is such an alert.
    """
    table = tables.alert
    row = unit.connection.execute(sa.select(table).where(table.c.id == alert_id)).first()
    if row is None:
        return False
    if row.state == "open":
        reason = "a person closed it"
        unit.connection.execute(
            sa.update(table)
            .where(table.c.id == alert_id)
            .values(state="closed", updated_ns=unit.now_ns, ended_ns=unit.now_ns, end_reason=reason)
        )
        _queue(unit, row, Change("closed", reason=reason), _channels_of(unit, alert_id))
    return True


# --- deliveries


def waiting(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return the deliveries that are to be sent, the oldest first."""
    table = tables.alert_delivery
    query = sa.select(table).where(table.c.state == "pending").order_by(table.c.id)
    return connection.execute(query).all()


def is_pending(connection: sa.Connection, delivery_id: int) -> bool:
    """Return whether a delivery is still to be sent."""
    table = tables.alert_delivery.c
    return connection.scalar(sa.select(table.state).where(table.id == delivery_id)) == "pending"


def end_delivery(unit: Unit, delivery_id: int, state: str, note: str, attempts: int) -> None:
    """Store how a delivery ended."""
    _set(unit, [delivery_id], state=state, note=note, attempts=attempts, ended_ns=unit.now_ns)


def put_off(unit: Unit, delivery_id: int, next_ns: int, note: str, attempts: int) -> None:
    """Store when a delivery is tried next, and why not now."""
    _set(unit, [delivery_id], next_ns=next_ns, note=note, attempts=attempts)


def skip_what_is_over(unit: Unit, alert_id: int, channel_id: int) -> bool:
    """Skip all messages about an alert that began and ended while they waited."""
    table = tables.alert_delivery.c
    mine = (table.alert_id == alert_id) & (table.channel_id == channel_id)
    rows = unit.connection.execute(
        sa.select(table.event, table.state, table.attempts).where(mine)
    ).all()
    is_over = any(row.event in ("recovered", "closed") for row in rows)
    is_unsent = all(row.state == "pending" and row.attempts == 0 for row in rows)
    if not (is_over and is_unsent):
        return False
    _end_waiting(unit, mine, "skipped", "it was over before the quiet hours were")
    return True


def send_again(unit: Unit, delivery_id: int) -> bool:
    """Let a delivery that was given up be tried once more; return whether it was one."""
    table = tables.alert_delivery
    done = unit.connection.execute(
        sa.update(table)
        .where(table.c.id == delivery_id, table.c.state.in_(("given_up", "dropped")))
        .values(
            state="pending", attempts=0, next_ns=unit.now_ns, created_ns=unit.now_ns,
            ended_ns=None, note="a person asked to send it again",
        )
    )  # fmt: skip
    return bool(done.rowcount)


def probe(unit: Unit) -> None:
    """Write something and take it back: shows whether the store takes writes."""
    table, uid = tables.alert_delivery, f"probe-{uuid.uuid4().hex}"
    row = {"uid": uid, "event": "test", "state": "skipped"}
    unit.connection.execute(sa.insert(table).values(row))
    unit.connection.execute(sa.delete(table).where(table.c.uid == uid))


def forget_old(unit: Unit) -> None:
    """Delete the oldest alerts and deliveries that are over."""
    for table, kept, is_over in (
        (tables.alert, ALERTS_KEPT, tables.alert.c.open_key.is_(None)),
        (tables.alert_delivery, DELIVERIES_KEPT, tables.alert_delivery.c.state != "pending"),
    ):
        newest = unit.connection.scalar(sa.select(sa.func.max(table.c.id))) or 0
        unit.connection.execute(sa.delete(table).where(is_over, table.c.id <= newest - kept))


def _end_waiting(unit: Unit, where: sa.ColumnElement[bool], state: str, note: str) -> None:
    table = tables.alert_delivery
    unit.connection.execute(
        sa.update(table)
        .where(where, table.c.state == "pending")
        .values(state=state, note=note, ended_ns=unit.now_ns)
    )


def _set(unit: Unit, ids: Iterable[int], **values: Any) -> None:
    table = tables.alert_delivery
    # what a person deleted or the quiet hours skipped meanwhile stays so
    unit.connection.execute(
        sa.update(table).where(table.c.id.in_(list(ids)), table.c.state == "pending").values(values)
    )
