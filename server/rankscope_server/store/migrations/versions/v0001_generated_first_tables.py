"""The first tables, generated from `store/tables.py`, and the full-text index of log lines.

Until the first release every change of the tables is another first version, so that a database
of an older one is refused and not read wrongly. The release writes these operations out.
"""

from __future__ import annotations

import hashlib

from alembic import op
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from rankscope_server.store.line_index import DDL
from rankscope_server.store.tables import metadata


def _version() -> str:
    """Return a name that changes with the tables."""
    elements: list[ExecutableDDLElement] = []
    for table in metadata.sorted_tables:
        elements += [CreateTable(table), *(CreateIndex(index) for index in table.indexes)]
    texts = [str(statement.compile(dialect=sqlite.dialect())) for statement in elements]
    texts += [statement for statements in DDL.values() for statement in statements]
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:12]


revision = _version()
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    metadata.create_all(op.get_bind())
    for statement in DDL[op.get_bind().dialect.name]:
        op.execute(statement)
