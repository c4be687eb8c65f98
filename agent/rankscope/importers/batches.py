"""What was imported, as the batches that a collector would send."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec

from rankscope.importers.flight_records import Imported
from rankscope.wire import schema

_RECORDS_PER_BATCH = 5_000
_BATCH_BYTES = 4 << 20  # far below what a server takes
_CHUNK_BYTES = 16 << 10  # an empty one counts as so much: no batch has more than 256


def batches(run_id: str, imported: Imported) -> Iterator[schema.Batch]:
    """Yield what is sent: first who the ranks are, so that the rest has an owner."""
    producer = f"import-{secrets.token_hex(8)}"
    started = schema.RunStarted(
        attempt=0, rank=schema.NODE_RANK, time_ns=min(r.time_ns for r in imported.records),
        name=run_id, command=[], launcher=schema.IMPORTED, world_size=imported.world_size,
    )  # fmt: skip
    records = [started, *imported.records]
    parts: list[tuple[list[schema.Record], list[schema.Chunk]]] = []
    for begin in range(0, len(records), _RECORDS_PER_BATCH):
        parts.append((records[begin : begin + _RECORDS_PER_BATCH], []))
    held = _BATCH_BYTES
    for chunk in imported.chunks:
        if held + len(chunk.data) > _BATCH_BYTES:
            parts.append(([], []))
            held = 0
        parts[-1][1].append(chunk)
        held += len(chunk.data) + _CHUNK_BYTES
    for number, (some, chunks) in enumerate(parts, 1):
        yield schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=run_id, producer=producer,
            sequence=number, host="imported", sent_ns=time.time_ns(),
            records=[msgspec.Raw(schema.encode(record)) for record in some], chunks=chunks,
        )  # fmt: skip
