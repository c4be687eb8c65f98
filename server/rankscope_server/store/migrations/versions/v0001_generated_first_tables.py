"""The first tables, generated from `store/tables.py`, and the full-text index of SQLite.

Until the first release every change of the tables is another first version, so that a database
of an older one is refused and not read wrongly. The release writes these operations out.
"""

from __future__ import annotations

import hashlib

from alembic import op
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from rankscope_server.store.lines import INDEX_TABLE
from rankscope_server.store.tables import metadata

# Trigrams of the distinct words of a block; detail=none: only which block, not where.
_INDEX = (
    f"CREATE VIRTUAL TABLE {INDEX_TABLE} USING fts5("
    "terms, content='', tokenize='trigram case_sensitive 1', detail='none')"
)


def _version() -> str:
    """Return a name that changes with the tables."""
    statements: list[ExecutableDDLElement] = []
    for table in metadata.sorted_tables:
        statements += [CreateTable(table), *(CreateIndex(index) for index in table.indexes)]
    texts = [str(statement.compile(dialect=sqlite.dialect())) for statement in statements]
    return hashlib.sha256("\n".join(sorted([*texts, _INDEX])).encode()).hexdigest()[:12]


revision = _version()
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    metadata.create_all(op.get_bind())
    if op.get_bind().dialect.name == "sqlite":
        op.execute(_INDEX)
