"""What the batches of one transaction change about their runs, written once at its end."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.ingest.chunks import ValidatedChunk
from rankscope_server.store import tables, trackers
from rankscope_server.store.chunks import insert_chunks
from rankscope_server.store.ranks import RankRows
from rankscope_server.store.spans import Samples, add_spans, samples_of

# Built once: to build a statement costs more than to run it.
_SELECT_RUN = sa.select(tables.run).where(tables.run.c.run_id == sa.bindparam("run"))
_SELECT_PRODUCERS = sa.select(tables.producer.c.producer, tables.producer.c.id).where(
    tables.producer.c.run_id == sa.bindparam("run"),
    tables.producer.c.producer.in_(sa.bindparam("names", expanding=True)),
)
_SELECT_BATCHES = sa.select(tables.batch.c.producer_id, tables.batch.c.sequence).where(
    sa.tuple_(tables.batch.c.producer_id, tables.batch.c.sequence).in_(
        sa.bindparam("keys", expanding=True)
    )
)
_SELECT_ATTEMPTS = sa.select(tables.attempt).where(
    tables.attempt.c.run_id == sa.bindparam("run"),
    tables.attempt.c.attempt.in_(sa.bindparam("numbers", expanding=True)),
)
_ROWS = 200  # of one question: SQLite bounds the number of parameters
_FIRST, _LAST = tables.producer.c.first_sequence, tables.producer.c.last_sequence
_SAYS_SIZE = (schema.RunStarted, schema.RankRegistered)
_UPDATE_PRODUCER = (
    sa.update(tables.producer)
    .where(tables.producer.c.id == sa.bindparam("key"))
    .values(
        last_sequence=sa.case(
            (_LAST > sa.bindparam("newest"), _LAST), else_=sa.bindparam("newest")
        ),
        # an earlier one may come later: then those between are missing
        first_sequence=sa.case(
            (_FIRST < sa.bindparam("oldest"), _FIRST), else_=sa.bindparam("oldest")
        ),
        received=tables.producer.c.received + sa.bindparam("more"),
        refused=tables.producer.c.refused + sa.bindparam("more_refused"),
        bytes=tables.producer.c.bytes + sa.bindparam("more_bytes"),
        received_ns=sa.bindparam("now_ns"),
    )
)


@dataclass(slots=True)
class _Sent:
    """What a producer sent."""

    oldest: int = 1 << 62
    newest: int = 0
    batches: int = 0
    refused: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _RunChanges:
    """What is new of a run."""

    times_ns: list[int] = field(default_factory=list)
    num_lines: int = 0
    num_refused: int = 0
    num_batches: int = 0
    started: schema.RunStarted | None = None  # the first
    trackers: list[schema.Event] = field(default_factory=list)
    world_size: int = 0  # the newest
    world_sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # by attempt


class RunRows:
    """One run in one transaction."""

    def __init__(self, connection: sa.Connection, run_id: str, now_ns: int) -> None:
        self.run_id = run_id
        self.ranks = RankRows(connection, run_id, now_ns)
        self._connection, self._now_ns = connection, now_ns
        self._producers: dict[str, int] = {}
        self._wanted: set[tuple[str, int]] = set()  # producer, sequence: not looked up yet
        self._read: set[tuple[str, int]] = set()
        self._stored: set[tuple[int, int]] = set()  # of those: row of the producer, sequence
        self._sent: dict[int, _Sent] = {}
        self._chunks: list[dict[str, Any]] = []
        self._samples: list[Samples] = []
        self._changes = _RunChanges()

    def want(self, batch: ValidatedBatch) -> None:
        """Let what a batch needs be read together with what others need."""
        self._wanted.add((batch.producer, batch.sequence))
        self.ranks.want(batch.ranks())

    def is_stored(self, batch: ValidatedBatch) -> bool:
        """Return whether a batch was stored before, in this transaction or another one."""
        if (batch.producer, batch.sequence) not in self._read:
            self.want(batch)
            self._look_up()
        return (self._producers.get(batch.producer, -1), batch.sequence) in self._stored

    def _look_up(self) -> None:
        """Read at once what is stored of all that is wanted."""
        wanted, self._wanted = self._wanted, set()
        self._read |= wanted
        names = {name for name, _ in wanted} - self._producers.keys()
        if names:
            chosen = {"run": self.run_id, "names": sorted(names)}
            for name, number in self._connection.execute(_SELECT_PRODUCERS, chosen):
                self._producers[name] = int(number)
        keys = [
            (self._producers[name], sequence)
            for name, sequence in sorted(wanted)
            if name in self._producers
        ]
        for at in range(0, len(keys), _ROWS):
            rows = self._connection.execute(_SELECT_BATCHES, {"keys": keys[at : at + _ROWS]})
            self._stored |= {(int(producer), int(sequence)) for producer, sequence in rows}

    def producer(self, batch: ValidatedBatch) -> int:
        """Return the row of who sends a batch that was looked up, a new one for a new sender."""
        known = self._producers.get(batch.producer)
        if known is None:
            inserted = self._connection.execute(
                sa.insert(tables.producer).values(
                    run_id=self.run_id, producer=batch.producer, host=batch.host,
                    first_sequence=batch.sequence,
                )
            )  # fmt: skip
            known = self._producers[batch.producer] = int(inserted.inserted_primary_key[0])  # type: ignore[index]
        return known

    def add_chunk(self, validated: ValidatedChunk, batch_id: int) -> None:
        """Take a chunk that is to be stored."""
        chunk = validated.chunk
        samples = samples_of(chunk, validated.columns)
        if samples is not None:
            self._samples.append(samples)
        self._chunks.append(
            {
                "run_id": self.run_id, "batch_id": batch_id, "kind": chunk.kind,
                "attempt": chunk.attempt, "rank": chunk.rank, "rank_hi": validated.ranks[-1],
                "host": chunk.host,
                "step_lo": chunk.step_lo, "step_hi": chunk.step_hi, "count": chunk.count,
                "time_lo_ns": chunk.time_lo_ns, "time_hi_ns": chunk.time_hi_ns,
                "max_duration_ns": validated.max_duration_ns, "data": chunk.data,
            }
        )  # fmt: skip

    def add(self, batch: ValidatedBatch, producer_id: int, num_lines: int) -> None:
        """Count a batch that is stored."""
        self._stored.add((producer_id, batch.sequence))
        sent = self._sent.setdefault(producer_id, _Sent())
        sent.oldest = min(sent.oldest, batch.sequence)
        sent.newest = max(sent.newest, batch.sequence)
        sent.batches += 1
        sent.refused += len(batch.refused)
        sent.num_bytes += batch.num_bytes
        changes = self._changes
        changes.times_ns += [record.time_ns for record in batch.records]
        changes.times_ns += [validated.chunk.time_hi_ns for validated in batch.chunks]
        changes.num_lines += num_lines
        changes.num_refused += len(batch.refused)
        changes.num_batches += 1
        for record in batch.records:
            if isinstance(record, schema.Event) and record.name == schema.TRACKER:
                changes.trackers.append(record)
            if not isinstance(record, _SAYS_SIZE):
                continue
            if isinstance(record, schema.RunStarted) and changes.started is None:
                changes.started = record
            if record.world_size:
                changes.world_size = record.world_size
                sizes = changes.world_sizes
                sizes[record.attempt] = max(sizes[record.attempt], record.world_size)

    def flush(self) -> None:
        """Write what was collected."""
        if not self._changes.num_batches:
            return
        if self._chunks:
            insert_chunks(self._connection, self.run_id, self._chunks)
        add_spans(self._connection, self.run_id, self._samples)
        self.ranks.flush()
        self._update_run()
        self._update_attempts()
        self._connection.execute(
            _UPDATE_PRODUCER,
            [
                {
                    "key": key, "oldest": sent.oldest, "newest": sent.newest, "more": sent.batches,
                    "more_refused": sent.refused, "more_bytes": sent.num_bytes,
                    "now_ns": self._now_ns,
                }
                for key, sent in self._sent.items()
            ],
        )  # fmt: skip

    def _update_run(self) -> None:
        table, changes, ranks = tables.run, self._changes, self.ranks
        row = self._connection.execute(_SELECT_RUN, {"run": self.run_id}).first()
        if row is None:
            self._connection.execute(
                sa.insert(table).values(run_id=self.run_id, received_ns=self._now_ns)
            )
            row = self._connection.execute(_SELECT_RUN, {"run": self.run_id}).one()
        times_ns = changes.times_ns
        values: dict[str, Any] = {
            "received_ns": self._now_ns,
            "last_seen_ns": max([row.last_seen_ns, *times_ns]),
            "attempt": max([row.attempt, *ranks.attempts]),
            "step": max(row.step, ranks.step),
            "log_lines": row.log_lines + changes.num_lines,
            "refused": row.refused + changes.num_refused,
            "version": row.version + changes.num_batches,
            "world_size": changes.world_size or row.world_size,
            "started_ns": row.started_ns,
        }
        if ranks.clean_step and values["step"] == ranks.clean_step + 1:
            values["step"] = ranks.clean_step  # it ended before the step that would have come next
        if times_ns and (row.started_ns == 0 or min(times_ns) < row.started_ns):
            values["started_ns"] = min(times_ns)
        started = changes.started
        if started is not None and not row.name:
            values |= {
                "name": started.name or self.run_id,
                "command": json.dumps(started.command),
                "launcher": started.launcher,
                "tags": json.dumps(started.tags),
            }
        if changes.trackers:
            values["trackers"] = trackers.merged(row.trackers, changes.trackers)
        self._connection.execute(
            sa.update(table).where(table.c.run_id == self.run_id).values(values)
        )

    def _update_attempts(self) -> None:
        table = tables.attempt
        chosen = {"run": self.run_id, "numbers": list(self.ranks.attempts)}
        rows = {row.attempt: row for row in self._connection.execute(_SELECT_ATTEMPTS, chosen)}
        for number, seen in self.ranks.attempts.items():
            row = rows.get(number)
            steps = [n for n in (row and row.step_lo, row and row.step_hi, *seen.steps) if n]
            times = [
                n for n in (row and row.started_ns, row and row.last_seen_ns, *seen.times) if n
            ]
            known_size = row.world_size if row else 0
            values: dict[str, Any] = {
                "started_ns": min(times, default=0),
                "last_seen_ns": max(times, default=0),
                "world_size": self._changes.world_sizes.get(number) or known_size,
                "step_lo": min(steps, default=None),
                "step_hi": max(steps, default=None),
            }
            clean_step = self.ranks.clean_step
            if clean_step and values["step_hi"] == clean_step + 1:
                values["step_hi"] = clean_step  # as in the row of the run
            where = (table.c.run_id == self.run_id) & (table.c.attempt == number)
            if row is None:
                values |= {"run_id": self.run_id, "attempt": number}
                self._connection.execute(sa.insert(table).values(values))
            else:
                self._connection.execute(sa.update(table).where(where).values(values))
