"""The launcher's journal: lines of output as records of the wire, exits that torchrun reports."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
import time
from pathlib import Path

from rankscope.files import journal, ring
from rankscope.files.run_directory import COLLECTIVES_RING, rank_directories
from rankscope.node.processes import exits
from rankscope.output.line_records import LineRecords
from rankscope.output.lines import Line, LineIndexer, Stream
from rankscope.wire import schema

_FAILED = (
    re.compile(
        r"failed \(exitcode: (?P<code>-?\d{1,10})\) local_rank: \d+ "
        r"\(pid: (?P<pid>\d{1,9})\)"
    ),
    re.compile(r"(?m)^\s+exitcode\s*: (?P<code>-?\d{1,10})\s+\(pid: (?P<pid>\d{1,9})\)"),
)
_LOOK_SECONDS = 1.0


class OutputRecords:
    """Writes the records of one launched command; the streams share it, each from its thread."""

    def __init__(
        self, run_directory: Path, own_directory: Path, own_rank: int = schema.NODE_RANK
    ) -> None:
        self._journal = journal.JournalWriter(own_directory)
        self._ranks = LocalRanks(run_directory, own_rank)
        self._exits = run_directory / "node" / exits.EXITS_FILE
        self._line_records = LineRecords()
        self._reported: set[int] = set()
        self._suppressed = 0
        self._lock = threading.Lock()

    def indexer(self, stream: Stream, roles: tuple[str, ...]) -> LineIndexer:
        """Return what takes in the bytes of one stream."""
        return LineIndexer(stream, self.line, self.suppressed, roles)

    def write(self, record: schema.Record) -> None:
        """Append a record."""
        self._journal.append(journal.RECORD, schema.encode(record))

    def line(self, line: Line) -> None:
        """Append a line of output; a report of torchrun is kept for the exits too."""
        with self._lock:
            attempt, rank = self._ranks.place(line.rank, line.local_rank)
            fields = {}
            if rank == schema.NODE_RANK and line.local_rank is not None:
                fields["local_rank"] = str(line.local_rank)
            records = self._line_records.of(line, attempt, rank, fields=fields)
            self._take_exit(line.text)
        for record in records:
            self.write(record)

    def suppressed(self, count: int) -> None:
        """Say that lines were not indexed, because there were too many."""
        with self._lock:
            self._suppressed += count
            total = self._suppressed
        now = time.time_ns()
        self.write(
            schema.LogLine(
                attempt=0,
                rank=schema.NODE_RANK,
                time_ns=now,
                level=logging.WARNING,
                message=f"{count} lines of output were not indexed: too many at once",
                stream="agent",
            )
        )
        self.write(
            schema.Loss(
                attempt=0,
                rank=schema.NODE_RANK,
                time_ns=now,
                source="output",
                reason="too many lines at once",
                count=total,
            )
        )

    def not_indexed(self, stream: Stream, why: str) -> None:
        """Say that the lines of a stream are not recorded any more."""
        self.write(
            schema.LogLine(
                attempt=0,
                rank=schema.NODE_RANK,
                time_ns=time.time_ns(),
                level=logging.ERROR,
                message=f"lines of {stream} from here on are not recorded: {why}",
                stream="agent",
            )
        )

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _take_exit(self, text: str) -> None:
        if "exitcode" not in text:
            return
        for match in itertools.chain.from_iterable(p.finditer(text) for p in _FAILED):
            if int(match["pid"]) in self._reported:
                continue
            self._reported.add(int(match["pid"]))
            status = exits.from_code(int(match["code"]), "torchrun's report")
            with contextlib.suppress(OSError):
                exits.append(self._exits, int(match["pid"]), status)


class LocalRanks:
    """Which global rank a local one is in the current attempt, from the headers of the rings."""

    def __init__(self, run_directory: Path, own_rank: int) -> None:
        self._run_directory = run_directory
        self._own_rank = own_rank  # of lines that do not say whose they are
        self._looked = 0.0
        self._attempt = 0
        self._by_local: dict[int, int] = {}

    def place(self, rank: int | None, local_rank: int | None) -> tuple[int, int]:
        """Return (attempt, rank) of a line, rank -1 where it is not known."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()
        if rank is not None:
            return self._attempt, rank
        if local_rank is not None:
            return self._attempt, self._by_local.get(local_rank, schema.NODE_RANK)
        return self._attempt, self._own_rank

    def _look(self) -> None:
        keys = rank_directories(self._run_directory, latest_only=True)
        if not keys:
            return
        self._attempt = int(keys[0].partition("/")[0])
        self._by_local = {}
        for key in keys:
            with contextlib.suppress(OSError):
                with (self._run_directory / key / COLLECTIVES_RING).open("rb") as file:
                    head = file.read(ring.IDENTITY.size)
                if len(head) == ring.IDENTITY.size:
                    fields = ring.IDENTITY.unpack(head)
                    if fields[0] == ring.MAGIC:
                        self._by_local[fields[8]] = fields[6]
