"""One training process as the collector sees it: its rings, its journal, its header, its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING, FATAL, RANK_KEY, STEPS_RING
from rankscope.node.columns import RankEvents, collective_events, step_events
from rankscope.node.flight.reader import FlightReader
from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.processes.exits import ExitStatus, Reason
from rankscope.node.processes.stacks import Look
from rankscope.node.ranks.journals import JournalFollower
from rankscope.node.ranks.outputs import RankOutput
from rankscope.node.ranks.rings import CollectiveFollower, StepFollower
from rankscope.node.sources.process import ProcessSampler
from rankscope.process.family import process_start_ticks
from rankscope.wire import schema
from rankscope.wire.redaction import redact

COLLECTED = "collected"  # an empty file: this directory is read to the end
_HALF_MADE_SECONDS = 5.0  # a ring without a valid header is damaged after that
_SOURCES = {
    "overwritten": "collectives", "journal full": "journal", "hook failed": "hooks",
    "too many alike": "logs",
}  # fmt: skip
_MAX_FATAL_BYTES = 200_000
Report = Callable[[str, dict[str, str]], None]  # name and fields of an event


class FollowedRank:
    """Reads one rank directory. `report` sends an event once; nothing in the files is trusted."""

    def __init__(
        self,
        run_directory: Path,
        key: str,
        offsets: RankOffsets,
        ledger: Ledger,
        host: str,
        report: Report,
    ) -> None:
        match = RANK_KEY.fullmatch(key)
        assert match is not None, key
        self.key = key
        self.attempt, self.rank, self.pid = (int(part) for part in match.groups())
        self.directory = run_directory / key
        self.local_rank = -1
        self.start_ticks = process_start_ticks(self.pid)  # until a header has it
        self.boot_id = b""
        self.stacks_offset = offsets.stacks
        self.output = RankOutput(
            self.directory, (self.attempt, self.rank), offsets.outputs, self._on_output_loss,
            report,
        )  # fmt: skip
        self.journal = JournalFollower(
            self.directory, offsets, self._on_journal_loss, self.output.frame
        )
        self.flight = FlightReader(self.directory, self._report_of_rank, self._on_flight_loss)
        self._news: list[schema.Event] = []
        self._ledger = ledger
        self._identity = (self.attempt, self.rank, host)
        self._report = report
        self._born = time.monotonic()
        self._damaged: set[str] = set()
        self._from = offsets
        self._dropped = list(offsets.dropped)
        self._collectives: CollectiveFollower | None = None
        self._steps: StepFollower | None = None
        self._rows: list[Any] = []
        self._step_rows: list[Any] = []
        self._usage = (0.0, 0)  # CPU seconds and resident bytes, as last known

    # --- reading -------------------------------------------------------------------------

    def collect(self, forward: Callable[[bytes], None], *, gone: bool = False) -> bool:
        """Read on, a bounded amount; return whether there is more to read now."""
        self._open_rings()
        self._leave_cut_rings()
        self.output.begin(forward)
        caught_up = self.journal.read(forward)
        if gone and caught_up:
            self.journal.end()
        self._read_flight(forward, gone=gone)  # behind the names of groups
        more = not caught_up
        more |= self.output.turn(forward, gone=gone)
        if self._collectives is not None and COLLECTIVES_RING not in self._damaged:
            names_final = gone and caught_up
            more |= self._read_collectives(self._collectives, gone=gone, names_final=names_final)
        if self._steps is not None and STEPS_RING not in self._damaged:
            more |= self._read_steps(self._steps)
        return more

    def _read_flight(self, forward: Callable[[bytes], None], *, gone: bool) -> None:
        if gone:
            self.flight.close()
        elif self._collectives is not None and COLLECTIVES_RING not in self._damaged:
            self.flight.turn(self._collectives.reader, self.journal.names.groups)
        while self._news:
            forward(schema.encode(self._news.pop(0)))

    def _read_collectives(
        self, follower: CollectiveFollower, *, gone: bool, names_final: bool
    ) -> bool:
        """Take final slots. A slot whose group is not named yet waits for the journal."""
        known = None if names_final else self.journal.names.groups
        try:
            last_done = self._last_done if gone else 0
            slots, lost, more = follower.read(
                time.monotonic_ns(), known, gone=gone, last_done=last_done
            )
        except ring.RingDamaged as error:
            self._damage(COLLECTIVES_RING, error)
            return False
        self._lose("collectives", "overwritten", lost)
        if len(slots):
            self._rows.append(slots)
        self._count_dropped(follower.reader)
        return more

    def _read_steps(self, follower: StepFollower) -> bool:
        try:
            slots, lost, more = follower.read()
        except ring.RingDamaged as error:
            self._damage(STEPS_RING, error)
            return False
        self._lose("steps", "overwritten", lost)
        if len(slots):
            self._step_rows.append(slots)
        return more

    def num_rows(self) -> int:
        """Return how many events wait for `take`."""
        return sum(len(rows) for rows in self._rows) + sum(len(rows) for rows in self._step_rows)

    def take(self) -> list[RankEvents]:
        """Return what was read since the last call."""
        taken = []
        if self._rows and self._collectives is not None:
            names = self.journal.names
            events, damaged = collective_events(
                np.concatenate(self._rows), self._collectives.reader.clock(), names.groups,
                names.call_sites, self._identity, self.flight.ends.device_ns,
            )  # fmt: skip
            self._lose("collectives", "damaged slot", damaged)
            taken.append(events)
        if self._step_rows and self._steps is not None:
            events, damaged = step_events(
                np.concatenate(self._step_rows), self._steps.reader.clock(), self._identity
            )
            self._lose("steps", "damaged slot", damaged)
            taken.append(events)
        self.drop_rows()
        return [events for events in taken if events is not None]

    def drop_rows(self) -> None:
        """Forget what was read: without a server it stays where it is."""
        self._rows, self._step_rows = [], []

    def close(self) -> None:
        """Let go of the files at once, not when the garbage collector comes by."""
        self._collectives = self._steps = None
        self.drop_rows()
        self.output.close()
        self.journal.close()

    def offsets(self) -> RankOffsets:
        """Return how far everything is read."""
        offsets = RankOffsets(
            read_to=self._from.read_to,
            open_ranges=self._from.open_ranges,
            steps_to=self._from.steps_to,
            stacks=self.stacks_offset,
            outputs=self.output.save(),
            dropped=list(self._dropped),
        )
        self.journal.save(offsets)
        if self._collectives is not None:
            self._collectives.save(offsets)
        if self._steps is not None:
            self._steps.save(offsets)
        return offsets

    # --- the header ----------------------------------------------------------------------

    @property
    def ended(self) -> int:
        """What the process said of its end, ring.RUNNING where it said nothing."""
        return self._collectives.reader.u8(ring.ENDED_AT) if self._collectives else ring.RUNNING

    @property
    def has_header(self) -> bool:
        """Whether the ring of collectives is there and sound."""
        return self._collectives is not None

    @property
    def last_step(self) -> int:
        """The step that the rank was in."""
        return min(self._collectives.reader.u64(ring.STEP_AT), 1 << 47) if self._collectives else 0

    def end_step(self, reason: str) -> int:
        """Return the step that the rank ended in: behind a clean end the last one that was done.

        `os._exit(0)` leaves no time to say that the step in progress never began.
        """
        step = self.last_step
        if reason != "clean" or self.ended != ring.RUNNING:
            return step
        return step - 1 if self._last_done == step - 1 > 0 else step

    def end_record(
        self, time_ns: int, reason: Reason, detail: str, status: ExitStatus | None
    ) -> schema.RankEnded:
        """Return the record of the end of this rank."""
        return schema.RankEnded(
            attempt=self.attempt,
            rank=self.rank,
            time_ns=time_ns,
            reason=reason,
            exit_code=None if status is None else status.exit_code,
            signal=None if status is None else status.signal,
            last_step=self.end_step(reason),
            detail=detail,
        )

    @property
    def _last_done(self) -> int:
        return self._steps.last_done() if self._steps is not None else 0

    @property
    def training_thread(self) -> int:
        """Native id of the thread that trains, 0 where it is not known."""
        return self._collectives.reader.u64(ring.TRAINING_THREAD_AT) if self._collectives else 0

    def heartbeat_ns(self) -> int:
        """Return when a hook ran last, monotonic; 0 not known."""
        return self._collectives.reader.u64(ring.HEARTBEAT_AT) if self._collectives else 0

    def is_held(self) -> bool | None:
        """Return whether a process in another pid namespace lives, by its hold on its files.

        None where that says nothing, and for any other process: a child may hold them after it.
        """
        if self._collectives is None or self.boot_id != ring.boot_id():
            return None
        reader = self._collectives.reader
        if reader.u64(ring.PID_NAMESPACE_AT) in (0, ring.pid_namespace()):
            return None
        return reader.is_held()

    def look(self) -> Look | None:
        """Return what the taking of stacks needs to know."""
        if self._collectives is None:
            return None
        reader, tracker = self._collectives.reader, self._collectives.tracker
        return Look(
            pid=self.pid,
            start_ticks=self.start_ticks,
            stack_signal=reader.u8(ring.STACK_SIGNAL_AT),
            ended=reader.u8(ring.ENDED_AT),
            heartbeat_ns=reader.u64(ring.HEARTBEAT_AT),
            oldest_open_ns=tracker.oldest_open_ns,
            oldest_inside_ns=tracker.oldest_inside_ns,
            step=self.last_step,
            world_size=reader.world_size,
            thinning=reader.u8(ring.THINNING_AT),
            thinning_wanted=reader.u8(ring.THINNING_WANTED_AT),
            thinning_asked=reader.u8(ring.THINNING_ASKED_AT),
        )

    def state(self, processes: ProcessSampler | None, *, alive: bool) -> schema.RankState | None:
        """Return where the rank is now, None as long as its header cannot be read.

        `processes` is None for a process that is gone or cannot be seen.
        """
        if self._collectives is None:
            return None
        reader = self._collectives.reader
        monotonic, wall = reader.clock()
        latest = time.time_ns() + 10**9  # a damaged header must not date from the future

        def to_wall(time_ns: int) -> int:
            return min(max(time_ns - monotonic + wall, 0), latest) if time_ns else 0

        phase = reader.u8(ring.PHASE_AT)
        if processes is not None and (usage := processes.sample(self.pid))[1]:
            self._usage = usage  # a process that is just gone has none: the last one known stays
        cpu_seconds, rss_bytes = self._usage
        names = self.journal.names
        groups = self._collectives.tracker.states(names.groups, names.call_sites, to_wall)
        if self.flight.standstill is not None:
            groups = self.flight.standstill.complete(groups, reader.u64(ring.HEAD_AT))
        return schema.RankState(
            attempt=self.attempt,
            rank=self.rank,
            time_ns=time.time_ns(),
            step=self.last_step,
            phase=schema.PHASES[phase] if phase < len(schema.PHASES) else "other",
            phase_since_ns=to_wall(reader.u64(ring.PHASE_SINCE_AT)),
            heartbeat_ns=to_wall(reader.u64(ring.HEARTBEAT_AT)),
            alive=alive,
            thinning=reader.u8(ring.THINNING_AT),
            thinning_wanted=reader.u8(ring.THINNING_WANTED_AT),
            thinning_asked=reader.u8(ring.THINNING_ASKED_AT),
            groups=groups,
            cpu_seconds=cpu_seconds,
            rss_bytes=rss_bytes,
        )

    def last_errors(self) -> list[schema.ErrorRaised]:
        """Return what others wrote of the end: faulthandler, and torchrun's error handler."""
        found = [self._fatal_error()]
        if self.ended != ring.EXCEPTION:  # else the process itself has recorded the same
            found.append(self.output.error(self.last_step))
        return [error for error in found if error is not None]

    def _fatal_error(self) -> schema.ErrorRaised | None:
        try:
            with (self.directory / FATAL).open("rb") as file:
                text = file.read(_MAX_FATAL_BYTES).decode(errors="replace").strip()
                written_ns = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None
        if not text:
            return None
        first = text.partition("\n")[0]
        return schema.ErrorRaised(
            attempt=self.attempt,
            rank=self.rank,
            time_ns=written_ns,
            type=first.removeprefix("Fatal Python error: ")[:200],
            message=first[:1000],
            traceback=redact(text),
            where="fatal_signal",
            step=self.last_step,
        )

    # --- inside --------------------------------------------------------------------------

    def _open_rings(self) -> None:
        if self._collectives is None and COLLECTIVES_RING not in self._damaged:
            reader = self._open(COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
            if reader is not None:
                self.start_ticks, self.boot_id = reader.pid_start_ticks, reader.boot_id
                self.local_rank = reader.local_rank
                try:
                    self._collectives = CollectiveFollower(reader, self._from, self.flight.ends)
                except ring.RingDamaged as error:
                    self._damage(COLLECTIVES_RING, error)
        if self._steps is None and STEPS_RING not in self._damaged:
            reader = self._open(STEPS_RING, ring.STEP_FIELDS)
            if reader is not None:
                self._steps = StepFollower(reader, self._from)

    def _leave_cut_rings(self) -> None:
        """Let go of a ring whose file is shorter now: a look at its header could end us too."""
        if self._is_cut(COLLECTIVES_RING, self._collectives, self._rows):
            self._collectives, self._rows = None, []
        if self._is_cut(STEPS_RING, self._steps, self._step_rows):
            self._steps, self._step_rows = None, []

    def _is_cut(
        self, name: str, follower: CollectiveFollower | StepFollower | None, rows: list[Any]
    ) -> bool:
        if follower is None:
            return False
        try:
            follower.reader.check_size()
        except ring.RingDamaged as error:
            follower.save(self._from)
            self._damage(name, error)
            self._lose(name.removesuffix(".ring"), "ring damaged", sum(map(len, rows)))
            return True
        return False

    def _open(self, name: str, fields: tuple[tuple[str, str, str], ...]) -> ring.RingReader | None:
        try:
            reader = ring.RingReader(self.directory / name, fields)
        except FileNotFoundError:
            return None
        except (ring.RingDamaged, OSError, ValueError) as error:
            if time.monotonic() - self._born > _HALF_MADE_SECONDS:
                self._damage(name, error)
            return None
        if reader.pid != self.pid:
            self._damage(name, ring.RingDamaged(f"it says pid {reader.pid}"))
            return None
        return reader

    def _damage(self, name: str, error: Exception) -> None:
        self._damaged.add(name)
        self._lose(name.removesuffix(".ring"), "ring damaged", 1)
        self._report("ring damaged", {"file": f"{self.key}/{name}", "reason": str(error)[:500]})

    def _report_of_rank(self, name: str, fields: dict[str, str]) -> None:
        self._news.append(
            schema.Event(
                attempt=self.attempt, rank=self.rank, time_ns=time.time_ns(), name=name,
                step=self.last_step, fields=fields,
            )
        )  # fmt: skip

    def _on_flight_loss(self, reason: str, count: int) -> None:
        self._lose("flight recorder", reason, count)

    def _on_journal_loss(self, reason: str, count: int) -> None:
        self._lose("journal", reason, count)

    def _on_output_loss(self, reason: str, count: int) -> None:
        self._lose("output", reason, count)

    def _lose(self, source: str, reason: str, count: int) -> None:
        self._ledger.add(source, reason, count, attempt=self.attempt, rank=self.rank)

    def _count_dropped(self, reader: ring.RingReader) -> None:
        for place, reason in enumerate(ring.DROP_REASONS):
            total = min(reader.u64(ring.DROPPED_AT + 8 * place), 1 << 40)
            if place >= len(self._dropped):
                self._dropped.append(0)
            if total > self._dropped[place]:
                source = _SOURCES.get(reason, "recorder")
                self._lose(source, reason, total - self._dropped[place])
                self._dropped[place] = total
