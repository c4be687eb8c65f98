"""Reads run directories that no collector follows, and changes nothing in them.

What comes out are the batches that a collector would have posted. Times are those of the record:
a rank whose end was not seen ends when the newest sign of the run was given, not now.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rankscope.files import journal, ring
from rankscope.files.run_directory import COLLECTIVES_RING, rank_directories
from rankscope.node.columns import chunks_of
from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.processes.exits import ExitStatuses, reason_of
from rankscope.node.ranks.copies import WithoutCopies
from rankscope.node.ranks.journals import JournalFollower
from rankscope.node.ranks.launchers import Launchers
from rankscope.node.ranks.rank import FollowedRank
from rankscope.node.upload.spool import SUFFIX, SpoolEntry
from rankscope.process.family import process_start_ticks
from rankscope.wire import schema, zstd

_RECORDS_PER_BATCH = 5_000
_ROWS_PER_CHUNK = 5_000
_PAUSE_SECONDS = 0.01  # a journal's next segment is taken up a moment after it is seen
_MAX_SPOOLED_BYTES = 256 << 20


def is_run_directory(path: Path) -> bool:
    """Return whether a directory is that of one run, as agents write it."""
    return bool(rank_directories(path))


class OfflineRun:
    """The directories of one run, one of each node. `now_ns` is the newest time of what was read.

    `notes` says what is missing. Read `batches` to the end first.
    """

    def __init__(self, directories: Sequence[Path], run_id: str) -> None:
        self.run_id = run_id
        self.now_ns = 0
        self.notes: list[str] = []
        self.is_open_ended = False  # the record stops, and how the ranks ended was not seen
        self._directories = directories
        self._producer = f"report-{secrets.token_hex(8)}"
        self._sequence = 0
        self._records: list[bytes] = []
        self._states: list[bytes] = []  # where each rank stood at the last
        self._chunks: list[schema.Chunk] = []
        self._ended: dict[tuple[int, int], int] = {}  # attempt and rank -> when, wall clock
        self._host = ""
        self._once = WithoutCopies(self._forward)

    def batches(self) -> Iterator[schema.Batch]:
        """Yield everything, the identity of ranks before what they did."""
        for directory in self._directories:
            self._host = _host_of(directory)
            yield from self._spooled(directory)
            gone: list[FollowedRank] = []
            for key in rank_directories(directory):
                rank = self._rank(directory, key)
                yield from self._read_rank(rank)
                gone.append(rank)
            self._read_journals(directory)
            found, self._records = self._records, []
            self._report_ends(directory, gone)
            self._records = [*self._states, *found, *self._records]  # an end is the last word
            yield self._batch()
            for rank in gone:
                rank.close()

    # --- parts -----------------------------------------------------------------------------

    def _spooled(self, directory: Path) -> Iterator[schema.Batch]:
        """Yield the batches that wait for a server; what it has got already is not here."""
        server = _text(directory / "node" / "server")
        if server:
            self.notes.append(
                f"{directory}: was sent to {server}; what that server has got is only there"
            )
        waiting = (directory / "node").glob(f"spool*/*{SUFFIX}")  # for any server
        for path in sorted(waiting, key=lambda path: path.name):
            try:
                body = zstd.unpack(SpoolEntry(0, 0, 0, path).body(), _MAX_SPOOLED_BYTES)
                batch = schema.decode_batch(body)
            except (OSError, ValueError, zstd.ZstdError, msgspec.MsgspecError) as error:
                self.notes.append(f"{path}: left out, {error}")
                continue
            for record in batch.records:
                self._see(bytes(record))
            yield msgspec.structs.replace(batch, run_id=self.run_id)

    def _read_journals(self, directory: Path) -> None:
        ledger = Ledger()
        launchers = Launchers(directory, {}, ledger)
        _to_the_end(lambda: not launchers.read(self._once))
        own = directory / "node" / "collector"  # what a collector without a server found
        if own.is_dir():
            follower = JournalFollower(
                own, RankOffsets(), lambda reason, count: ledger.add("journal", reason, count)
            )
            _to_the_end(lambda: not follower.read(self._forward))
            follower.close()
        for loss in ledger.take_records():
            self._forward(schema.encode(loss), is_sign=False)

    def _rank(self, directory: Path, key: str) -> FollowedRank:
        self._ledger = Ledger()
        host = _host_of(directory, key) or self._host

        def report(name: str, fields: dict[str, str]) -> None:
            self.notes.append(f"{name}: {', '.join(fields.values())}")

        return FollowedRank(directory, key, RankOffsets(), self._ledger, host, report)

    def _read_rank(self, rank: FollowedRank) -> Iterator[schema.Batch]:
        more = True
        while more:
            more = rank.collect(self._once, gone=True)
            if rank.num_rows() >= _ROWS_PER_CHUNK or not more:
                for chunk in chunks_of(rank.take()):
                    self._sign(chunk.time_hi_ns)
                    self._chunks.append(chunk)
            if len(self._records) >= _RECORDS_PER_BATCH or self._chunks:
                yield self._batch()
            if more:
                time.sleep(_PAUSE_SECONDS)
        if not rank.has_header:
            self.notes.append(f"{rank.key}: {COLLECTIVES_RING} cannot be read")
        self._sign(self._heartbeat(rank))
        for error in rank.last_errors():
            self._forward(schema.encode(error), is_sign=False)
        for loss in self._ledger.take_records():
            self._forward(schema.encode(loss), is_sign=False)

    def _report_ends(self, directory: Path, ranks: Sequence[FollowedRank]) -> None:
        """Record how far each rank is, and how it ended where no record says so."""
        exit_statuses, boot = ExitStatuses(directory / "node"), ring.boot_id()
        alive = {rank.key for rank in ranks if _is_alive(rank, boot)}
        if alive:
            self.now_ns = time.time_ns()
        ends = [self._end(rank, exit_statuses) for rank in ranks if rank.key not in alive]
        unrecorded = [end for end in ends if (end.attempt, end.rank) not in self._ended]
        has_witness = bool(alive or self._ended) or any(end.reason != "lost" for end in unrecorded)
        if unrecorded and not has_witness:  # what would have seen an end went away with the ranks
            self.is_open_ended = True
            self.notes.append(
                f"{directory}: how its ranks ended is not known; no process here outlived them"
            )
        self._states = []
        for rank in ranks:
            # a process is there until its end is seen, though no hook runs in it any longer
            seen_ns = self._ended.get((rank.attempt, rank.rank)) or self._heartbeat(rank)
            at = self.now_ns if rank.key in alive else seen_ns or self.now_ns
            state = rank.state(None, alive=rank.key in alive or not has_witness)
            if state is not None:
                self._states.append(schema.encode(msgspec.structs.replace(state, time_ns=at)))
        for end in unrecorded if has_witness else ():
            self._forward(schema.encode(end))

    def _end(self, rank: FollowedRank, exit_statuses: ExitStatuses) -> schema.RankEnded:
        status = exit_statuses.find(rank.pid, rank.start_ticks)
        reason, detail = reason_of(rank.ended, status)
        return rank.end_record(self.now_ns, reason, detail, status)

    def _heartbeat(self, rank: FollowedRank) -> int:
        state = rank.state(None, alive=False)
        return 0 if state is None else state.heartbeat_ns

    # --- what is sent -----------------------------------------------------------------------

    def _forward(self, body: bytes, *, is_sign: bool = True) -> None:
        if is_sign:
            self._see(body)
        self._records.append(body)

    def _see(self, body: bytes) -> None:
        """Take note of the time of a record, and of the end that it may report."""
        try:
            record: Any = schema.decode_record(body)
        except (msgspec.MsgspecError, ValueError):
            return  # the server says why it refuses it
        self._sign(record.time_ns)
        if isinstance(record, schema.RankEnded):
            self._ended[record.attempt, record.rank] = record.time_ns

    def _sign(self, time_ns: int) -> None:
        # a damaged record must not date the run into the future
        self.now_ns = max(self.now_ns, min(time_ns, time.time_ns()))

    def _batch(self) -> schema.Batch:
        self._sequence += 1
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=self.run_id, producer=self._producer,
            sequence=self._sequence, host=self._host, sent_ns=time.time_ns(),
            records=[msgspec.Raw(body) for body in self._records], chunks=self._chunks,
        )  # fmt: skip
        self._records, self._chunks = [], []
        return batch


def _to_the_end(read: Callable[[], bool]) -> None:
    while read():
        time.sleep(_PAUSE_SECONDS)


def _is_alive(rank: FollowedRank, boot: bytes) -> bool:
    ticks = process_start_ticks(rank.pid)
    return rank.boot_id == boot and ticks != 0 and ticks == rank.start_ticks


def _host_of(directory: Path, key: str = "") -> str:
    """Return the host that the ranks of a directory, or one of them, say they run on."""
    for name in [key] if key else rank_directories(directory):
        for _, path in journal.segments(directory / name):
            for kind, body, _ in journal.read_frames(path, 0):
                try:
                    record = schema.decode_record(body) if kind == journal.RECORD else None
                except (msgspec.MsgspecError, ValueError):
                    continue
                if isinstance(record, schema.RankRegistered):
                    return record.host
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()[:200]
    except OSError:
        return ""
