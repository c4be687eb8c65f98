"""Retention: pins, deletions, what was removed, how much there is. Alerts. Advice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import number, run, run_key, serial, text, word

revision = "0003_alerts"
down_revision = "0002_search"
# What a new server begins with; each can be changed, and sends to every channel there will be.
_RULES = {
    "Critical findings": '{"when":{"about":"finding","min_severity":"critical"}}',
    "Runs that stand still": '{"when":{"about":"stall","seconds":1800}}',
    "Runs that went silent": '{"when":{"about":"silence","seconds":120}}',
    "The server is behind": '{"when":{"about":"lag","seconds":120}}',
    "The server's disk": '{"when":{"about":"disk","free_bytes":5368709120}}',
}


def upgrade() -> None:
    """Make the tables, and the rules that a new server begins with."""
    _retention()
    _alerts()
    rules = sa.table("alert_rule", sa.column("name"), sa.column("body"))
    op.bulk_insert(rules, [{"name": name, "body": body} for name, body in _RULES.items()])


def _retention() -> None:
    op.create_table(
        "pin",
        run_key(), number("pinned_ns"),
    )  # fmt: skip
    op.create_table(
        "deletion",
        run_key(), text("name"), text("reason"), number("asked_ns"), number("finished_ns", None),
        number("rows"), number("bytes"), number("rows_at_start"), number("bytes_at_start"),
    )  # fmt: skip
    op.create_table(
        "removal",
        run_key(), word("kind", 32, is_key=True), number("rows"), number("bytes"),
        number("received_before_ns"), number("removed_ns"),
    )  # fmt: skip
    op.create_table(
        "received_mark",
        number("time_ns", is_key=True), number("chunk_id"), number("log_block_id"),
        number("event_id"), number("stacks_id"), number("command_id"), number("batch_id"),
    )  # fmt: skip
    op.create_table(
        "stored_size",
        run_key(), word("kind", 32, is_key=True), number("rows"), number("bytes"),
        number("run_version"), number("counted_ns"),
    )  # fmt: skip
    op.create_table(
        "size_counted",
        word("source", 32, is_key=True), number("counted_id"),
    )  # fmt: skip


def _alerts() -> None:
    op.create_table(
        "alert_channel",
        serial(), word("name", 128), word("kind", 32), number("is_enabled", 1), text("body", "{}"),
        text("secrets", "{}"), text("quiet", "null"), number("created_ns"), number("updated_ns"),
        sa.UniqueConstraint("name"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_table(
        "alert_rule",
        serial(), word("name", 128), text("body", "{}"), number("created_ns"),
        number("updated_ns"), sa.UniqueConstraint("name"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_table(
        "alert",
        serial(), word("uid", 64), sa.Column("open_key", sa.String(640)), number("rule_id"),
        text("rule_name"),
        word("subject", 512), word("run_id", 128, default=""), text("run_name"), word("state", 16),
        word("severity", 16), text("what"), text("why"), text("next"), text("path"),
        text("facts", "[]"), number("opened_ns"), number("updated_ns"), number("notified_ns"),
        number("ended_ns", None), text("end_reason"), sa.UniqueConstraint("uid"),
        sa.UniqueConstraint("open_key"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_alert_state", "alert", ["state"])
    op.create_table(
        "alert_delivery",
        serial(), word("uid", 64), number("alert_id"), number("channel_id"), text("channel_name"),
        word("event", 16), text("message", "{}"), word("state", 16), number("attempts"),
        number("created_ns"), number("next_ns"), number("ended_ns", None), text("note"),
        sa.UniqueConstraint("uid"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_alert_delivery_alert_id", "alert_delivery", ["alert_id"])
    op.create_index("ix_alert_delivery_state", "alert_delivery", ["state"])
    op.create_table(
        "advice",
        run_key(), number("epoch", is_key=True), number("given_ns"), text("body", "{}"),
    )  # fmt: skip
    op.create_table(
        "advice_report",
        serial(), run(), number("epoch"), number("time_ns"), text("controller"),
        word("outcome", 16), text("text"),
    )  # fmt: skip
    op.create_index("ix_advice_report_run_id", "advice_report", ["run_id"])
