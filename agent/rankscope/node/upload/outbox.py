"""Collects what was read and turns it into numbered, durable batches.

One commit is one file is one batch; see `offsets` for why that makes restarts exact.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from rankscope.files import journal
from rankscope.files.run_directory import make_private
from rankscope.node import offsets as progress
from rankscope.node.losses import Ledger
from rankscope.node.offsets import Offsets, RankOffsets
from rankscope.node.upload.spool import Spool, SpoolEntry, SpoolHeader
from rankscope.wire import schema, zstd

MAX_PENDING_BYTES = 4 << 20  # of records; a batch stays far below what the server takes
_LOCAL_KINDS = (
    schema.RankEnded, schema.ErrorRaised, schema.Event, schema.Stacks, schema.Loss,
    schema.LogLine,
)  # fmt: skip

logger = logging.getLogger(__name__)


class Outbox(Protocol):
    """Takes everything that the collector reads or finds out."""

    wants_chunks: bool

    def record(self, record: schema.Record) -> None:
        """Add a record that the collector made."""

    def forward(self, body: bytes) -> None:
        """Add a record as a rank encoded it."""

    def chunk(self, chunk: schema.Chunk) -> None:
        """Add a chunk."""

    def is_full(self) -> bool:
        """Return whether it is time to commit for the size alone."""

    def commit(
        self, files: dict[str, RankOffsets], finished: list[str], reported: list[str]
    ) -> None:
        """Make everything durable that was added, together with how far the files are read."""

    def safe(self) -> Offsets | None:
        """Return the offsets up to which everything is durable somewhere."""

    def is_empty(self) -> bool:
        """Return whether nothing waits, neither here nor for the server."""

    def num_waiting(self) -> int:
        """Return how many batches wait for the server."""


class SpoolingOutbox:
    """Batches for a server."""

    wants_chunks = True

    def __init__(
        self,
        run_id: str,
        host: str,
        node_directory: Path,
        spool: Spool,
        offsets: Offsets,
        ledger: Ledger,
        wall_ns: Callable[[], int] = time.time_ns,
        on_record: Callable[[schema.Record], None] = lambda record: None,
    ) -> None:
        self._on_record = on_record
        self._run_id = run_id
        self._host = host
        self._node_directory = node_directory
        self._spool = spool
        self._offsets = offsets
        self._ledger = ledger
        self._wall_ns = wall_ns
        self._records: list[bytes] = []
        self._chunks: list[schema.Chunk] = []
        self._record_bytes = 0
        self._memory_producer = new_producer(host)
        self._memory_sequence = 0
        self._disk_failed = False
        self._safe: Offsets | None = None

    def record(self, record: schema.Record) -> None:
        """Add a record that the collector made."""
        self._on_record(record)
        self.forward(schema.encode(record))

    def forward(self, body: bytes) -> None:
        """Add a record as a rank encoded it."""
        self._records.append(body)
        self._record_bytes += len(body)

    def chunk(self, chunk: schema.Chunk) -> None:
        """Add a chunk."""
        self._chunks.append(chunk)

    def is_full(self) -> bool:
        """Return whether it is time to commit for the size alone."""
        return self._record_bytes > MAX_PENDING_BYTES

    def commit(
        self, files: dict[str, RankOffsets], finished: list[str], reported: list[str]
    ) -> None:
        """Make everything durable that was added, together with how far the files are read."""
        self._take_losses()
        if not self._records and not self._chunks:
            return
        reached = Offsets(
            producer=self._offsets.producer,
            sequence=self._offsets.sequence + 1,
            files=files,
            finished=finished,
            losses=self._ledger.totals(),
            reported=reported,
        )
        going = self._make_room(reached)
        if going:
            self._lose(going, "spool full")
            self._take_losses()
            reached.losses = self._ledger.totals()
            reached.dropped = [entry.sequence for entry in going]
        entry = self._to_disk(reached) or self._to_memory()
        self._spool.delete(going)
        if entry.path is None:  # its number was not used up
            reached = msgspec.structs.replace(reached, sequence=self._offsets.sequence)
        self._offsets = reached
        self._records, self._chunks, self._record_bytes = [], [], 0
        self._lose(self._spool.offer(entry), "disk full")

    def _take_losses(self) -> None:
        for loss in self._ledger.take_records():
            self.record(loss)

    def _lose(self, entries: list[SpoolEntry], reason: str) -> None:
        """Count the batches that go; they may have named totals themselves."""
        if entries:
            self._ledger.add("spool", reason, sum(entry.num_items for entry in entries))
            self._ledger.say_all_again()

    def _make_room(self, reached: Offsets) -> list[SpoolEntry]:
        """Take batches out of the spool so that this one fits."""
        plain = self._record_bytes + sum(len(chunk.data) + 256 for chunk in self._chunks)
        if self._spool.has_room(plain + len(msgspec.msgpack.encode(reached)) + 1024):
            return []  # it is smaller, if anything
        body = self._encode(reached.producer, reached.sequence)
        return self._spool.make_room(len(body) + len(msgspec.msgpack.encode(reached)) + 256)

    def safe(self) -> Offsets | None:
        """Return the offsets up to which everything is durable somewhere."""
        if not self._spool.has_memory_entries():
            self._safe = self._offsets
        return self._safe

    def is_empty(self) -> bool:
        """Return whether nothing waits here, and the server has stored all."""
        has_some = self._records or self._chunks or self._ledger.has_news()
        return not has_some and self._spool.is_empty()

    def num_waiting(self) -> int:
        """Return how many batches wait for the server."""
        return self._spool.waiting()[0]

    def _to_disk(self, reached: Offsets) -> SpoolEntry | None:
        items = self._num_items()
        header = SpoolHeader(reached.producer, reached.sequence, items, reached)
        entry: SpoolEntry | None = None
        try:
            entry = self._spool.write(header, self._encode(reached.producer, reached.sequence))
            progress.save(self._node_directory, reached)
        except OSError as error:
            if entry is not None and entry.path is not None:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
            if not self._disk_failed:
                self._say_disk_failed(error)
                logger.warning(
                    "no batch can be written to %s: %s. Batches wait in memory; what does not fit "
                    "there is dropped and counted", self._node_directory, error,
                )  # fmt: skip
            self._disk_failed = True
            return None
        if self._disk_failed:
            logger.warning("batches can be written to %s again", self._node_directory)
        self._disk_failed = False
        return entry

    def _say_disk_failed(self, error: OSError) -> None:
        """Report it to the server too: the log is on the same disk."""
        fields = {"reason": str(error), "directory": str(self._node_directory)}
        self.record(
            schema.Event(
                attempt=0,
                rank=schema.NODE_RANK,
                time_ns=self._wall_ns(),
                name="collector cannot write to its disk",
                fields=fields,
            )
        )

    def _to_memory(self) -> SpoolEntry:
        self._memory_sequence += 1
        body = self._encode(self._memory_producer, self._memory_sequence)
        return SpoolEntry(
            self._memory_sequence, self._num_items(), len(body), None, body, self._memory_producer
        )

    def _num_items(self) -> int:
        return len(self._records) + sum(chunk.count for chunk in self._chunks)

    def _encode(self, producer: str, sequence: int) -> bytes:
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self._run_id,
            producer=producer,
            sequence=sequence,
            host=self._host,
            sent_ns=self._wall_ns(),
            records=[msgspec.Raw(body) for body in self._records],
            chunks=self._chunks,
        )
        return zstd.pack(schema.encode(batch))


class LocalOutbox:
    """No server: what ranks wrote stays in their files, what the collector found joins them."""

    wants_chunks = False

    def __init__(self, node_directory: Path, ledger: Ledger) -> None:
        directory = node_directory / "collector"
        make_private(directory)
        self._journal = journal.JournalWriter(directory)
        self._ledger = ledger

    def record(self, record: schema.Record) -> None:
        """Keep what is rare; states and samples would only fill the disk."""
        if isinstance(record, _LOCAL_KINDS) and not self._keep(record):
            self._ledger.add("collector journal", self._journal.last_error, 1)

    def forward(self, body: bytes) -> None:
        """Leave it where it is."""

    def chunk(self, chunk: schema.Chunk) -> None:
        """Leave it where it is."""

    def is_full(self) -> bool:
        """Never: nothing is kept in memory."""
        return False

    def commit(
        self, files: dict[str, RankOffsets], finished: list[str], reported: list[str]
    ) -> None:
        """Write down the losses; those that the disk does not take come again."""
        if not all([self._keep(loss) for loss in self._ledger.take_records()]):
            self._ledger.say_all_again()

    def _keep(self, record: schema.Record) -> bool:
        return self._journal.append(journal.RECORD, schema.encode(record))

    def safe(self) -> Offsets | None:
        """Nothing is durable elsewhere: no file may be deleted."""
        return None

    def is_empty(self) -> bool:
        """Nothing waits."""
        return True

    def num_waiting(self) -> int:
        """Return none: there is no server."""
        return 0


def new_producer(host: str) -> str:
    """Return an id that no other collector has."""
    return f"{host[:200]}-{secrets.token_hex(6)}"
