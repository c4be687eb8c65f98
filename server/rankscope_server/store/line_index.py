"""The index of log lines: which sealed blocks may hold a word, or the beginning of one.

SQLite has FTS5 for it, without contents and positions; PostgreSQL a `tsvector` of the terms of
each block under a GIN index. The terms are those of `search/words.py`.
"""

from __future__ import annotations

import sqlalchemy as sa

from rankscope_server.search.lookup import AllOf, Lookup, Term

TABLE = "log_index"  # the migrations make it; spaces are between terms, all else belongs to them

MAX_TERM_BYTES = 1_000_000  # of a block; PostgreSQL takes 1 MiB


def takes(terms: set[str]) -> bool:
    """Return whether a block of these terms can be in the index; else it is always searched."""
    return len(" ".join(terms).encode()) <= MAX_TERM_BYTES


def add(connection: sa.Connection, block_id: int, terms: set[str]) -> None:
    """Add a block by its terms."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(
            f"INSERT INTO {TABLE}(rowid, terms) VALUES (?, ?)", (block_id, " ".join(terms))
        )
    else:
        connection.execute(
            sa.text(f"INSERT INTO {TABLE} VALUES (:block, array_to_tsvector(:terms))"),
            {"block": block_id, "terms": list(terms)},
        )


def forget(connection: sa.Connection, block_id: int, terms: set[str]) -> None:
    """Take a block out of the index by its terms."""
    if connection.dialect.name == "sqlite":  # an index without content wants the words to forget
        connection.exec_driver_sql(
            f"INSERT INTO {TABLE}({TABLE}, rowid, terms) VALUES ('delete', ?, ?)",
            (block_id, " ".join(terms)),
        )
    else:
        connection.execute(
            sa.text(f"DELETE FROM {TABLE} WHERE block_id = :block"), {"block": block_id}
        )


def blocks_with(connection: sa.Connection, lookup: Lookup) -> sa.TextualSelect:
    """Return a selection of the ids of the sealed blocks that hold what is looked up."""
    is_sqlite = connection.dialect.name == "sqlite"
    if is_sqlite:
        statement = f"SELECT rowid FROM {TABLE} WHERE {TABLE} MATCH :match"
    else:
        statement = f"SELECT block_id FROM {TABLE} WHERE terms @@ CAST(:match AS tsquery)"
    match = _fts5(lookup) if is_sqlite else _tsquery(lookup)
    return sa.text(statement).bindparams(match=match).columns(sa.column("rowid", sa.BigInteger))


def _fts5(lookup: Lookup) -> str:
    if isinstance(lookup, Term):
        return '"' + lookup.text.replace('"', '""') + '"' + ("*" if lookup.is_prefix else "")
    word = " AND " if isinstance(lookup, AllOf) else " OR "
    return "(" + word.join(map(_fts5, lookup.of)) + ")"


def _tsquery(lookup: Lookup) -> str:
    if isinstance(lookup, Term):
        text = lookup.text.replace("\\", "\\\\").replace("'", "''")
        return f"'{text}'" + (":*" if lookup.is_prefix else "")
    word = " & " if isinstance(lookup, AllOf) else " | "
    return "(" + word.join(map(_tsquery, lookup.of)) + ")"
