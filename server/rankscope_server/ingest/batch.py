"""One batch, validated: what of a request can be stored, and what cannot."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.wire.schema import AnyRecord
from rankscope_server.ingest.chunks import ValidatedChunk, validate_chunks
from rankscope_server.ingest.envelope import read_envelope, unpack_body
from rankscope_server.ingest.records import Refused, validate_records


@dataclass(frozen=True, slots=True)
class ValidatedBatch:
    """What of a request can be stored, and what cannot."""

    run_id: str
    producer: str
    sequence: int
    host: str
    num_bytes: int
    records: list[AnyRecord]
    chunks: list[ValidatedChunk]
    refused: list[Refused]
    takes_commands: bool = False
    sent_ns: int = 0  # when it was made, by its collector's clock

    def ranks(self) -> set[tuple[int, int]]:
        """Return the (attempt, rank) that it is about."""
        of_records = {(record.attempt, record.rank) for record in self.records if record.rank >= 0}
        return of_records | {(one.chunk.attempt, r) for one in self.chunks for r in one.ranks}


def validate_batch(
    body: bytes, encoding: str, max_unpacked_bytes: int, takes_commands: bool = False
) -> ValidatedBatch:
    """Decode and check a body. Raises Problem where it is not a batch at all."""
    envelope = read_envelope(unpack_body(body, encoding, max_unpacked_bytes))
    records, refused = validate_records(envelope.records)
    chunks, refused_chunks = validate_chunks(envelope.chunks)
    return ValidatedBatch(
        run_id=envelope.run_id,
        producer=envelope.producer,
        sequence=envelope.sequence,
        host=envelope.host,
        num_bytes=len(body),
        records=records,
        chunks=chunks,
        refused=refused + refused_chunks,
        takes_commands=takes_commands,
        sent_ns=envelope.sent_ns,
    )
