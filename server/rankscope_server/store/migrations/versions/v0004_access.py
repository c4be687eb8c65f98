"""Tokens, sessions, the audit log, and the project of each run and preflight."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import number, serial, text, word

revision = "0004_access"
down_revision = "0003_alerts"


def upgrade() -> None:
    """Add the tables and the columns."""
    for table in ("run", "preflight"):
        op.add_column(table, word("project", 64, default="default"))
    op.create_table(
        "token",
        word("id", 16, is_key=True), text("hash"), text("name"),
        word("project", 64, default="default"), text("roles"), number("bytes_per_second"),
        number("created_ns"), text("created_by"), number("expires_ns", None),
        number("revoked_ns", None), number("used_ns", None),
    )  # fmt: skip
    op.create_table(
        "session",
        word("id", 64, is_key=True), word("token_id", 16), text("proof"), number("created_ns"),
        number("expires_ns"),
    )  # fmt: skip
    op.create_index("ix_session_expires_ns", "session", ["expires_ns"])
    op.create_table(
        "audit",
        serial(), number("time_ns"), word("project", 64, default="default"), text("who"),
        text("address"), word("action", 128), text("target"), text("detail"), number("count", 1),
        sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_audit_project_id", "audit", ["project", "id"])
