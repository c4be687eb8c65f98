"""What the server asks of the ranks of this node: hands it on, and says what became of it.

The server repeats a command until its answer is there; `answered` survives a restart of the
collector together with the batch that holds the answer, so each command is done once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rankscope.files.commands import (
    ANSWERS,
    MAX_BYTES,
    REQUESTS,
    Answers,
    RankAnswer,
    decode_answers,
    encode,
)
from rankscope.files.run_directory import replace_file
from rankscope.node.ranks.lives import Followed
from rankscope.node.upload.traces import Trace, TraceResult, TraceWorker
from rankscope.wire import schema
from rankscope.wire.schema import SAMPLING, Command, CommandAnswer

ANSWERED = "command "  # begins the entries of Offsets.reported that are ours
_LOOK_SECONDS = 0.5
_MAX_OPEN = 256
_MAX_ANSWERED = 1000
State: TypeAlias = Literal["running", "done", "refused"]

logger = logging.getLogger(__name__)


@dataclass
class OpenCommand:
    """One command in one rank."""

    command: Command
    key: str  # the rank's directory, relative to the run's
    directory: Path
    rank: int
    deadline: float
    is_running: bool = False
    is_sending: bool = False

    @property
    def name(self) -> str:
        """What it is called among the answered ones."""
        return f"{ANSWERED}{self.command.id} {self.rank}"


class CommandDesk:
    """Commands of all followed ranks. `received` may be called from any thread."""

    def __init__(
        self,
        record: Callable[[schema.Record], None],
        reported: Iterable[str],
        traces: TraceWorker,
        *,
        is_enabled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._traces = traces
        self._is_enabled = is_enabled
        self._clock = clock
        self._answered = dict.fromkeys(name for name in reported if name.startswith(ANSWERED))
        self._came: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self._open: dict[str, OpenCommand] = {}
        self._answers: dict[str, tuple[tuple[int, int], Answers]] = {}
        self._next_look = 0.0
        self._known: set[str] = set()
        self._trace_files: dict[str, Path] = {}
        self._to_delete: list[Path] = []

    def received(self, commands: list[Command]) -> None:
        """Take what came in an answer of the server, or what this collector asks itself."""
        self._came.put(commands)

    def answered(self) -> list[str]:
        """Return the names of the commands that are done with; they go with the offsets."""
        return list(self._answered)[-_MAX_ANSWERED:]

    def is_idle(self) -> bool:
        """Return whether no trace is on its way."""
        return not any(pending.is_sending for pending in self._open.values())

    def is_recording(self, key: str) -> bool:
        """Return whether a rank records so that its collectives match those of its peers."""
        return key not in self._answers or self._answers[key][1].is_recording

    def turn(self, followed: Mapping[str, Followed]) -> bool:
        """Do what is due; return whether something should be sent at once."""
        while self._to_delete:  # their answers are in a batch since the last turn
            with contextlib.suppress(OSError):
                self._to_delete.pop().unlink()
        num_answered = len(self._answered)
        now = self._clock()
        while not self._came.empty():
            for command in self._came.get():
                self._take(command, followed, now)
        self._take_traces()
        self._take_stacks(followed)
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            for key, rank in followed.items():
                if key not in self._known:
                    self._begin(key, rank.rank.directory)
                self._read_answers(key, rank.rank.directory)
        for open_command in list(self._open.values()):
            self._advance(open_command, followed, now)
        return len(self._answered) != num_answered

    def _begin(self, key: str, directory: Path) -> None:
        """Withdraw what a collector before us asked for: the server repeats what still holds."""
        self._known.add(key)
        if (directory / REQUESTS).exists():
            self._write_requests(key, directory)

    # --- new commands --------------------------------------------------------------------

    def _take(self, command: Command, followed: Mapping[str, Followed], now: float) -> None:
        for rank in command.ranks:
            key = _key_of(followed, command.attempt, rank)
            if key is None:
                continue  # not here, or not yet: the server repeats it
            directory = followed[key].rank.directory
            pending = OpenCommand(command, key, directory, rank, now + command.expires_in_seconds)
            if pending.name in self._answered or pending.name in self._open:
                continue
            self._open[pending.name] = pending
            reason = self._refusal(followed[key], command)
            if reason:
                self._finish(pending, "refused", reason)
            elif command.kind == "stacks":
                followed[key].stacks.request(
                    command.id,
                    command.asked_by,
                    is_automatic=command.asked_by != "user" and not _is_sampling(command),
                )
            else:
                self._write_requests(key, directory)

    def _refusal(self, followed: Followed, command: Command) -> str:
        if not self._is_enabled:
            return "this node takes no commands: RANKSCOPE_COMMANDS=0"
        if followed.life.is_gone:
            return "the process has ended"
        if len(self._open) > _MAX_OPEN:
            return f"{_MAX_OPEN} commands are open on this node"
        if command.kind == "stacks":
            if followed.life.is_elsewhere:
                return "the process is in another pid namespace: no signal reaches it"
            look = followed.rank.look()
            if look is None or not (look.stack_signal or followed.stacks.has_fallback):
                return "the rank has no handler for stacks, and there is no py-spy"
            if _is_sampling(command) and not look.stack_signal:
                return "the rank has no handler for stacks; py-spy would stop it for each of them"
        return ""

    def _write_requests(self, key: str, directory: Path) -> None:
        asked = [pending.command for pending in self._open.values() if pending.key == key]
        asked = [command for command in asked if command.kind != "stacks"]
        try:
            replace_file(directory / REQUESTS, encode(asked))
        except OSError as error:
            logger.warning("a request to %s cannot be written: %s", key, error)

    # --- what became of them -------------------------------------------------------------

    def _read_answers(self, key: str, directory: Path) -> None:
        path = directory / ANSWERS
        try:
            status = os.stat(path)
            seen = (status.st_ino, status.st_mtime_ns)
            if self._answers.get(key, (None, None))[0] == seen:
                return
            if status.st_size > MAX_BYTES:
                raise ValueError("too large")
            self._answers[key] = (seen, decode_answers(path.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("%s cannot be read: %s", path, error)

    def _advance(self, pending: OpenCommand, followed: Mapping[str, Followed], now: float) -> None:
        if pending.is_sending:
            return
        rank = followed.get(pending.key)
        is_gone = rank is None or rank.life.is_gone
        if is_gone:
            self._read_answers(pending.key, pending.directory)
        reported = self._answers[pending.key][1].answers if pending.key in self._answers else {}
        answer = reported.get(pending.command.id)
        is_over = answer is not None and answer.state != "running"
        if is_gone and not is_over:
            self._finish(pending, "refused", "the process ended before it was done")
        elif answer is not None and pending.command.kind != "stacks":
            self._take_answer(pending, answer)
        elif now > pending.deadline:  # the server calls it expired
            del self._open[pending.name]
            self._write_requests(pending.key, pending.directory)

    def _take_answer(self, pending: OpenCommand, answer: RankAnswer) -> None:
        if answer.state == "running":
            if not pending.is_running:
                pending.is_running = True
                self._say(pending, "running", answer.reason)
        elif answer.state == "done" and answer.file:
            pending.is_sending = True
            path = pending.directory / Path(answer.file).name
            self._trace_files[pending.name] = path
            self._traces.put(
                Trace(pending.name, pending.command.id, pending.rank, path, answer.reason)
            )
        else:
            self._finish(pending, answer.state, answer.reason)

    def _take_traces(self) -> None:
        for result in self._traces.results():
            pending = self._open.get(result.name)
            if pending is not None:
                self._to_delete.append(self._trace_files.pop(pending.name))
                self._finish(
                    pending, "refused" if result.why else "done", result.text, trace=result
                )

    def _take_stacks(self, followed: Mapping[str, Followed]) -> None:
        for key, rank in followed.items():
            for command, state, reason in rank.stacks.take_answers():
                for pending in list(self._open.values()):
                    if pending.key == key and pending.command.id == command:
                        self._finish(pending, state, reason)

    def _finish(
        self,
        pending: OpenCommand,
        state: State,
        reason: str,
        trace: TraceResult | None = None,
    ) -> None:
        self._say(pending, state, reason, trace)
        self._answered[pending.name] = None
        self._open.pop(pending.name, None)
        if pending.command.kind != "stacks":
            self._write_requests(pending.key, pending.directory)

    def _say(
        self, pending: OpenCommand, state: State, reason: str, trace: TraceResult | None = None
    ) -> None:
        if pending.command.id < 0:  # this collector's own: the server knows nothing of it
            return
        self._record(
            CommandAnswer(
                attempt=pending.command.attempt,
                rank=pending.rank,
                time_ns=time.time_ns(),
                command=pending.command.id,
                state=state,
                reason=reason,
                trace_bytes=0 if trace is None else trace.num_bytes,
                operators=[] if trace is None else trace.operators,
            )
        )


def _is_sampling(command: Command) -> bool:
    """Return whether stacks of a rank that trains are asked for, again and again."""
    return command.asked_by.startswith(SAMPLING)


def _key_of(followed: Mapping[str, Followed], attempt: int, rank: int) -> str | None:
    """Return the directory of a rank: of several the one that lives."""
    found = [
        key
        for key, known in followed.items()
        if known.rank.attempt == attempt and known.rank.rank == rank
    ]
    return min(found, key=lambda key: followed[key].life.is_gone, default=None)
