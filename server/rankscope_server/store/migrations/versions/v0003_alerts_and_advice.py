"""Alerts: channels, rules, what is open, what is sent. Advice: what was given, what was done.

A database whose first version was generated from newer tables has them already.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.versions import v0002_retention as before

revision = "0003_alerts"
down_revision = before.revision
_Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the tables that are missing, and the rules that a new server begins with."""
    known = set(sa.inspect(op.get_bind()).get_table_names())
    for name, make in _TABLES.items():
        if name not in known:
            make(name)
    rules = sa.table("alert_rule", sa.column("name"), sa.column("body"))
    if not op.get_bind().execute(sa.select(rules.c.name)).first():
        op.bulk_insert(rules, [{"name": name, "body": body} for name, body in _RULES.items()])


def _id() -> sa.Column[int]:
    return sa.Column("id", _Serial, primary_key=True, autoincrement=True)


def _number(name: str, default: int | None = 0, *, is_key: bool = False) -> sa.Column[int]:
    if is_key:
        return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)
    if default is None:
        return sa.Column(name, sa.BigInteger)
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=str(default))


def _text(name: str, default: str = "") -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def _word(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _channel(name: str) -> None:
    op.create_table(
        name, _id(), _word("name", 128), _word("kind", 32), _number("is_enabled", 1),
        _text("body", "{}"), _text("secrets", "{}"), _text("quiet", "null"),
        _number("created_ns"), _number("updated_ns"),
        sa.UniqueConstraint("name", name="uq_alert_channel_name"), sqlite_autoincrement=True,
    )  # fmt: skip


def _rule(name: str) -> None:
    op.create_table(
        name, _id(), _word("name", 128), _text("body", "{}"), _number("created_ns"),
        _number("updated_ns"), sa.UniqueConstraint("name", name="uq_alert_rule_name"),
        sqlite_autoincrement=True,
    )  # fmt: skip


def _alert(name: str) -> None:
    op.create_table(
        name, _id(), _word("uid", 64), sa.Column("open_key", sa.String(640)), _number("rule_id"),
        _text("rule_name"), _word("subject", 512),
        sa.Column("run_id", sa.String(128), nullable=False, server_default=""),
        _text("run_name"), _word("state", 16), _word("severity", 16), _text("what"), _text("why"),
        _text("next"), _text("path"), _text("facts", "[]"), _number("opened_ns"),
        _number("updated_ns"), _number("notified_ns"), _number("ended_ns", None),
        _text("end_reason"), sa.UniqueConstraint("uid", name="uq_alert_uid"),
        sa.UniqueConstraint("open_key", name="uq_alert_open_key"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_alert_state", name, ["state"])


def _delivery(name: str) -> None:
    op.create_table(
        name, _id(), _word("uid", 64), _number("alert_id"), _number("channel_id"),
        _text("channel_name"), _word("event", 16), _text("message", "{}"), _word("state", 16),
        _number("attempts"), _number("created_ns"), _number("next_ns"), _number("ended_ns", None),
        _text("note"), sa.UniqueConstraint("uid", name="uq_alert_delivery_uid"),
        sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_alert_delivery_state", name, ["state"])
    op.create_index("ix_alert_delivery_alert_id", name, ["alert_id"])


def _advice(name: str) -> None:
    op.create_table(
        name, sa.Column("run_id", sa.String(128), primary_key=True),
        _number("epoch", is_key=True), _number("given_ns"), _text("body", "{}"),
    )  # fmt: skip


def _advice_report(name: str) -> None:
    op.create_table(
        name, _id(), _word("run_id", 128), _number("epoch"), _number("time_ns"),
        _text("controller"), _word("outcome", 16), _text("text"),
    )  # fmt: skip
    op.create_index("ix_advice_report_run_id", name, ["run_id"])


_TABLES = {
    "alert_channel": _channel,
    "alert_rule": _rule,
    "alert": _alert,
    "alert_delivery": _delivery,
    "advice": _advice,
    "advice_report": _advice_report,
}
# What a new server begins with; each can be changed, and sends to every channel there will be.
_RULES = {
    "Critical findings": '{"when":{"about":"finding","min_severity":"critical"}}',
    "Runs that stand still": '{"when":{"about":"stall","seconds":1800}}',
    "Runs that went silent": '{"when":{"about":"silence","seconds":120}}',
    "The server is behind": '{"when":{"about":"lag","seconds":120}}',
    "The server's disk": '{"when":{"about":"disk","free_bytes":5368709120}}',
}
