"""Asks the Flight Recorder of one rank: every 2 seconds where that is safe, and at incidents."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from rankscope.files import flight_recorder as flight
from rankscope.files import ring
from rankscope.files.run_directory import FLIGHT_SETUP, FLIGHT_SOCKET
from rankscope.node.flight.ask import Question
from rankscope.node.flight.ends import Ends
from rankscope.node.flight.match import Matcher
from rankscope.node.flight.standstill import Standstill, standstill

EVERY_SECONDS = 2.0
MAX_PAUSE_SECONDS = 60.0
MAX_DUMPS = 3  # files of one rank; the newest stay
FRESH_SECONDS = 10.0  # after that the last answer says nothing of what is in flight
_LOOK_SECONDS = 1.0
_MAX_SETUP_BYTES = 1 << 20
_BAD_ANSWERS_TO_REPORT = 3
_MAX_HEAD = 1 << 48
_MAX_GROUPS = 30  # of a summary
_MAX_FRAMES = 10
_MAX_TEXT = 400
Report = Callable[[str, dict[str, str]], None]  # name and fields of an event of this rank
Lose = Callable[[str, int], None]  # reason and count


class FlightReader:
    """The Flight Recorder of one rank. `turn` never waits."""

    def __init__(self, directory: Path, report: Report, lose: Lose) -> None:
        self.ends = Ends()
        self.standstill: Standstill | None = None  # of the last incident
        self._directory = directory
        self._report, self._lose = report, lose
        self._setup = flight.FlightSetup()
        self._seen = (0, 0)
        self._next_look = self._next_poll = 0.0
        self._matchers: dict[str, Matcher] = {}
        self._question: Question | None = None
        self._reason = ""  # of the question under way, empty for one of the polls
        self._head = 0  # calls that had been made when it was asked
        self._wanted: deque[tuple[str, str]] = deque()  # handler, reason: of incidents
        self._turns = -1
        self._num_dumps = 0
        self._bad_answers = 0
        self._answered = -FRESH_SECONDS

    def turn(self, reader: ring.RingReader, groups: Mapping[int, str]) -> None:
        """Take an answer that came, and ask the next question that is due."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._read_setup()
            self._hold(groups, now)
        if self._question is not None:
            if not self._question.is_done():
                return
            question, self._question = self._question, None
            self._take(question, reader, groups, now)
        if self._wanted:
            handler, self._reason = self._wanted.popleft()
            self._head = reader.u64(ring.HEAD_AT)
            self._question = Question(self._directory / FLIGHT_SOCKET, handler)
        elif self._setup.polled and now >= self._next_poll:
            self._next_poll = now + self._pause()
            self._reason = ""
            self._turns = (self._turns + 1) % len(self._setup.polled)
            handler = self._setup.polled[self._turns]
            self._question = Question(self._directory / FLIGHT_SOCKET, handler)

    def incident(self, reason: str) -> None:
        """Keep a whole dump as a file, and report its summary: something is stuck."""
        if not self._wanted:
            self._wanted.extend((handler, reason) for handler in self._setup.handlers)

    def close(self) -> None:
        """The rank is gone: forget it, and delete the socket that it may have left."""
        self._setup, self._question = flight.FlightSetup(), None
        self._wanted.clear()
        self.ends.held = []
        self.ends.in_flight = self.ends.in_flight[:0]
        with contextlib.suppress(OSError):
            (self._directory / FLIGHT_SOCKET).unlink()

    def _pause(self) -> float:
        pause: float = EVERY_SECONDS * 2 ** min(self._bad_answers, 10)
        return min(pause, MAX_PAUSE_SECONDS)

    def _read_setup(self) -> None:
        path = self._directory / FLIGHT_SETUP
        try:
            status = os.stat(path)
            if (status.st_ino, status.st_mtime_ns) == self._seen:
                return
            if status.st_size > _MAX_SETUP_BYTES:
                return
            self._setup = flight.decode(path.read_bytes())
            self._seen = (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            self._setup = flight.FlightSetup()
        except (OSError, msgspec.MsgspecError, ValueError):
            return  # half a file of a full disk: looked at again

    def _hold(self, groups: Mapping[int, str], now: float) -> None:
        """Let slots wait only while there are answers to wait for."""
        is_answering = bool(self._setup.polled) and self._bad_answers < _BAD_ANSWERS_TO_REPORT
        endless = set(self._setup.endless) if is_answering else set()
        self.ends.held = [index for index, label in groups.items() if label in endless]
        if now - self._answered > FRESH_SECONDS:
            self.ends.in_flight = self.ends.in_flight[:0]

    def _take(
        self, question: Question, reader: ring.RingReader, groups: Mapping[int, str], now: float
    ) -> None:
        if question.is_gone:
            return  # the rank is ending
        if question.dump is None:
            self._bad_answers += 1
            if self._reason or self._bad_answers == _BAD_ANSWERS_TO_REPORT:
                fields = {"reason": str(question.error)[:500], "handler": question.handler}
                self._report("flight recorder silent", fields)
            return
        self._bad_answers, self._answered = 0, now
        if self._reason:
            self._keep(question)
            if question.handler not in self._setup.polled:
                self.standstill = standstill(question.dump, self._head, groups)
        if question.handler in self._setup.polled:
            self._match(question, reader, groups)

    def _match(
        self, question: Question, reader: ring.RingReader, groups: Mapping[int, str]
    ) -> None:
        assert question.dump is not None
        matcher = self._matchers.setdefault(question.handler, Matcher())
        matcher.is_timed = self._setup.is_timed
        head = min(reader.u64(ring.HEAD_AT), _MAX_HEAD)
        oldest = max(0, head - reader.num_slots)
        slots, state = reader.read(np.arange(oldest, min(head, oldest + reader.num_slots)))
        found = matcher.take(question.dump, slots[state == 1], groups, _clock(question, reader))
        self.ends.add(found.rows, oldest)
        self.ends.in_flight = found.in_flight
        self._lose("overwritten before it was read", found.overwritten)
        self._lose("no such call recorded", found.unmatched)

    def _keep(self, question: Question) -> None:
        assert question.dump is not None
        self._num_dumps += 1
        name = f"flight_recorder.{self._num_dumps}.json"
        fields = {"reason": self._reason, "file": name, "handler": question.handler}
        try:
            (self._directory / name).write_bytes(question.answer)
            old = self._directory / f"flight_recorder.{self._num_dumps - MAX_DUMPS}.json"
            old.unlink(missing_ok=True)
        except OSError as error:
            fields["file"] = f"not written: {error}"
        self._report("flight recorder", fields | summary(question.dump))


def _clock(question: Question, reader: ring.RingReader) -> tuple[int, int]:
    """Return a pair of the rank's clocks: ours are newer, unless it has another time namespace."""
    monotonic, wall = reader.clock()
    ahead = question.clock[1] - question.clock[0]
    return question.clock if abs(ahead - (wall - monotonic)) < 10**9 else (monotonic, wall)


def summary(dump: flight.Dump) -> dict[str, str]:
    """Return the fields of an event: how far each group is, and the oldest open operation."""
    fields = {"entries": str(len(dump.entries))}
    names = {str(entry.pg_id): entry.process_group for entry in dump.entries}
    for pg_id, status in sorted(dump.pg_status.items())[:_MAX_GROUPS]:
        name, description = names.get(pg_id, (f"number {pg_id}", ""))
        fields[f"group {name} {description}".strip()[:_MAX_TEXT]] = (
            f"enqueued {status.get('last_enqueued_collective', '?')}, "
            f"started {status.get('last_started_collective', '?')}, "
            f"completed {status.get('last_completed_collective', '?')}"
        )
    waiting = flight.open_entries(dump)
    fields["open"] = str(len(waiting))
    if waiting:
        oldest = min(waiting, key=lambda entry: entry.record_id)
        fields["oldest open"] = _text(oldest)
        if oldest.frames:
            fields["oldest open, called from"] = "\n".join(
                f"{frame.filename}:{frame.line} {frame.name}"[:_MAX_TEXT]
                for frame in oldest.frames[:_MAX_FRAMES]
            )
    return fields


def _text(entry: flight.FlightEntry) -> str:
    at = datetime.fromtimestamp(entry.time_created_ns / 1e9, UTC) if _is_time(entry) else None
    parts = [
        f"{entry.profiling_name} in group {' '.join(entry.process_group)}",
        f"number {entry.sequence}",
        entry.state,
        f"{' '.join(entry.input_dtypes)} {entry.input_sizes} -> {entry.output_sizes}",
        "" if at is None else f"called {at:%Y-%m-%d %H:%M:%S.%f} UTC",
    ]
    return ", ".join(part for part in parts if part)[: 2 * _MAX_TEXT]


def _is_time(entry: flight.FlightEntry) -> bool:
    return 0 < entry.time_created_ns < 1 << 61
