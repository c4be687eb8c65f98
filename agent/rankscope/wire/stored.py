"""Pages of what a server stores of a run, as its programs hand them to each other.

Chunks are handed out as they came: the server does not unpack them, and a reader has the columns of
`rankscope.wire.schema` at the full resolution. Sparse records are rows of a few plain columns.
"""

from __future__ import annotations

import msgspec

from rankscope.wire.schema import CHUNK_COLUMNS

PAGE_BYTES = 8 << 20  # of chunks: a page ends with the one that reaches this
MAX_ROWS = 5_000  # of a page

# Kinds of rows: columns in their order. `*_ns` are wall clock; JSON is text. None: not known.
ROW_COLUMNS: dict[str, tuple[str, ...]] = {
    "attempts": ("attempt", "started_ns", "last_seen_ns", "world_size", "step_lo", "step_hi"),
    "ranks": (
        "attempt", "rank", "host", "node_rank", "local_rank", "local_world_size", "world_size",
        "pid", "role", "backend", "stage", "num_stages", "num_microbatches", "schedule",
        "registered_ns", "last_seen_ns", "step", "ended_ns", "end_reason", "exit_code",
        "exit_signal", "end_detail",
    ),
    "groups": ("attempt", "group", "ranks", "backend", "description"),
    "environment": ("attempt", "rank", "time_ns", "facts"),
    "metrics": ("attempt", "rank", "name", "step", "time_ns", "value"),
    "events": ("id", "attempt", "rank", "time_ns", "step", "name", "fields"),
    "errors": (
        "id", "attempt", "rank", "time_ns", "step", "type", "message", "traceback", "place",
        "fingerprint",
    ),
    "findings": (
        "id", "attempt", "key", "state", "opened_ns", "updated_ns", "recovered_ns", "body",
    ),
    "clock_offsets": ("host", "time_ns", "offset_ns", "band_ns"),
    "losses": ("rank", "host", "source", "reason", "count", "time_ns"),
}  # fmt: skip
LOGS = "logs"
# What reads as a table: kinds of chunks, of rows, and log lines.
KINDS: tuple[str, ...] = (*CHUNK_COLUMNS, *ROW_COLUMNS, LOGS)


class StoredChunk(msgspec.Struct, array_like=True, frozen=True):
    """One chunk; its columns are `rankscope.wire.chunk.decode_chunk` of `data`."""

    attempt: int
    rank: int  # the first one where `data` says several
    host: str
    count: int
    data: bytes


class ChunkPage(msgspec.Struct, frozen=True):
    """Chunks in the order in which they came (msgpack)."""

    chunks: list[StoredChunk]
    after: int | None  # what to ask the next page with; None: this is the last one
    num_events: int | None  # of all pages, before events outside of the range; in the first one
    num_unread: int = 0  # chunks of this page whose data is missing or damaged at the server


class RowPage(msgspec.Struct, frozen=True):
    """Rows in the order of their keys."""

    columns: list[str]
    rows: list[list[int | float | str | None]]
    after: str | None  # what to ask the next page with; None: this is the last one
