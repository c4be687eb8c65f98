"""Tokens, sessions, the audit log, and the project of each run and preflight.

What is there already is left alone: the first version makes all tables of `store/tables.py`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.versions import v0003_alerts_and_advice as before
from rankscope_server.store.tables import DEFAULT_PROJECT, audit, session, token

revision = "0004_access"
down_revision = before.revision


def upgrade() -> None:
    """Add the tables and the columns."""
    bind = op.get_bind()
    found = sa.inspect(bind)
    for table in ("run", "preflight"):
        if "project" not in {column["name"] for column in found.get_columns(table)}:
            column = sa.Column(
                "project", sa.String(64), nullable=False, server_default=DEFAULT_PROJECT
            )
            op.add_column(table, column)
    for new in (token, session, audit):
        new.create(bind, checkfirst=True)
