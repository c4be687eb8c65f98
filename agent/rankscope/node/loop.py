"""The turn of the collector: look for ranks, read them, look at them, commit, tidy up, end."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rankscope.files import ring
from rankscope.files.run_directory import STACKS, rank_directories
from rankscope.node.columns import chunks_of
from rankscope.node.commands import CommandDesk
from rankscope.node.ending import EndRules
from rankscope.node.losses import Ledger
from rankscope.node.offsets import Offsets, RankOffsets
from rankscope.node.processes.asking import StackAsker
from rankscope.node.processes.exits import ExitStatus, ExitStatuses, OomWatch
from rankscope.node.processes.liveness import DeathWatch
from rankscope.node.processes.stacks import Look, StackTaker
from rankscope.node.ranks import rank as rank_files
from rankscope.node.ranks.copies import WithoutCopies
from rankscope.node.ranks.launchers import Launchers
from rankscope.node.ranks.lives import Followed, Life
from rankscope.node.ranks.rank import FollowedRank
from rankscope.node.sources.base import News, RankProcess
from rankscope.node.sources.process import ProcessSampler
from rankscope.node.sources.sampling import Sampling
from rankscope.node.thinning import Agreement
from rankscope.node.upload.outbox import Outbox
from rankscope.node.upload.traces import TraceWorker
from rankscope.settings import Settings
from rankscope.wire import schema

TURN_SECONDS = 0.2
BUSY_SECONDS = 0.005
STATE_SECONDS = 1.0
MAX_ROWS = 5000  # events in one batch, roughly
_MOST_WINDOWS = 5  # in one batch: what is in none yet is lost with this collector and its rank
_FAILURES_TO_ABANDON = 3
_ROUTINE = ("machine sources", "gpus")  # news that every healthy run has

logger = logging.getLogger(__name__)


def windows_of(num_waiting: int) -> int:
    """Return how many windows the next batch should hold while so many batches wait.

    A batch costs the server much the same whatever it holds; the wait makes a small one no newer.
    """
    return min(max(num_waiting, 1), _MOST_WINDOWS)


class Collector:
    """Everything of one node. `turn` is called until `is_done` says that nothing is left."""

    def __init__(
        self,
        run_directory: Path,
        settings: Settings,
        host: str,
        outbox: Outbox,
        ledger: Ledger,
        offsets: Offsets,
        sampling: Sampling,
    ) -> None:
        self.wake = threading.Event()
        self.refused: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[schema.Record] = queue.SimpleQueue()  # by other threads
        self._run_directory = run_directory
        self._settings = settings
        self._host = host
        self._outbox = outbox
        self._once = WithoutCopies(outbox.forward)
        self._printed: list[bytes] = []  # of launchers, not passed on yet
        self._ledger = ledger
        self._sampling = sampling
        self._launchers = Launchers(run_directory, offsets.files, ledger)
        self._rules = EndRules(self._launchers)
        self._start_offsets = offsets
        self._exit_statuses = ExitStatuses(run_directory / "node")
        self._watch = DeathWatch(self.wake.set, self._write_exit)
        self._watch.start()
        self._oom = OomWatch()
        self._processes = ProcessSampler()
        self._followed: dict[str, Followed] = {}
        self._finished: dict[str, bool] = dict.fromkeys(offsets.finished, False)  # -> is marked
        self.traces = TraceWorker(run_directory.name, run_directory / "node" / "traces")
        self.commands = CommandDesk(
            outbox.record, offsets.reported, self.traces, is_enabled=settings.commands
        )
        self._agreement = Agreement(self.commands.received)
        self._reported: set[str] = set(offsets.reported) - set(self.commands.answered())
        self._next_state = 0.0
        self._next_flush = 0.0
        self._more = False
        self._boot_id = ring.boot_id()
        self._last_ended = 0.0

    # --- the turn ------------------------------------------------------------------------

    def turn(self) -> None:
        """Do everything once that is due; takes milliseconds."""
        now = time.monotonic()
        self._rules.look()
        a_second_passed = now >= self._next_state
        # before the ranks are read: what they printed of a log record comes behind the record
        self._more = not self._launchers.read(self._printed.append)
        self._find(latest_only=not a_second_passed)
        urgent = self._take_deaths()
        for followed in list(self._followed.values()):
            self._read(followed)
            if self._is_much():
                self.commit(all_samples=False)
        self._pass_on_printed()
        self._more |= any(followed.has_more for followed in self._followed.values())
        if a_second_passed:
            self._next_state = now + STATE_SECONDS
            self._once_a_second()
        urgent |= self._take_stacks()
        urgent |= self.commands.turn(self._followed)
        urgent |= self._end_the_gone()
        if urgent or now >= self._next_flush or self._is_much():
            windows = windows_of(self._outbox.num_waiting())
            self._next_flush = now + windows * self._settings.flush_seconds
            self.commit(all_samples=urgent)

    def _pass_on_printed(self) -> None:
        for record in self._printed:
            self._once(record)
        self._printed.clear()

    def _is_much(self) -> bool:
        rows = sum(followed.rank.num_rows() for followed in self._followed.values())
        return rows >= MAX_ROWS or self._outbox.is_full()

    def sleep(self) -> None:
        """Wait for the next turn, hardly at all if there is more to read."""
        self.wake.wait(BUSY_SECONDS if self._more else TURN_SECONDS)
        self.wake.clear()

    def take_commands(self, commands: list[schema.Command]) -> None:
        """Take what the server asks for; from any thread."""
        self.commands.received(commands)
        self.wake.set()

    def commit(self, *, all_samples: bool = True) -> None:
        """Make a batch of everything read so far, and delete what is durable elsewhere.

        Without `all_samples` the newest samples of the machine may wait for more.
        """
        self._pass_on_printed()
        files = {key: followed.rank.offsets() for key, followed in self._followed.items()}
        for key, journal in self._launchers.journals().items():
            journal.save(files.setdefault(key, RankOffsets()))
        if self._outbox.wants_chunks:
            self._chunk(followed.rank for followed in self._followed.values())
        else:
            for followed in self._followed.values():
                followed.rank.drop_rows()
        for chunk in self._sampling.take_chunks(all_of_them=all_samples):
            self._outbox.chunk(chunk)
        finished = [key for key, is_marked in self._finished.items() if not is_marked]
        reported = [*sorted(self._reported), *self.commands.answered()]
        self._outbox.commit(files, finished, reported)
        self._tidy()

    def _chunk(self, ranks: Iterable[FollowedRank]) -> None:
        """Add what was read of these ranks, as few chunks."""
        for chunk in chunks_of([events for rank in ranks for events in rank.take()]):
            self._outbox.chunk(chunk)

    # --- when to end ---------------------------------------------------------------------

    def should_end(self) -> bool:
        """Return whether there is nothing left to wait for; see EndRules."""
        return self._rules.should_end(
            num_alive=len(self._followed),
            num_ended=len(self._finished),
            last_ended=self._last_ended,
            is_drained=self.is_drained(),
        )

    def is_drained(self) -> bool:
        """Return whether everything is read, and acknowledged where there is a server."""
        # first the spool: what the upload finds out is in these queues before a batch is done
        is_empty = self._outbox.is_empty() and self.refused.empty() and self.found.empty()
        return is_empty and not self._more and self.commands.is_idle()

    def has_finished_all(self) -> bool:
        """Return whether every rank directory is read to its end, and marked so."""
        return not self._followed and all(self._finished.values())

    # --- parts of the turn ---------------------------------------------------------------

    def _find(self, *, latest_only: bool) -> None:
        for key in rank_directories(self._run_directory, latest_only=latest_only):
            if key in self._followed or key in self._finished:
                continue
            if (self._run_directory / key / rank_files.COLLECTED).exists():
                self._finished[key] = True
                continue
            offsets = self._start_offsets.files.get(key, RankOffsets())
            rank = FollowedRank(
                self._run_directory, key, offsets, self._ledger, self._host, self._report_once
            )
            asker = StackAsker(rank.directory / STACKS)
            stacks = StackTaker(
                rank.directory / STACKS,
                offsets.stacks,
                asker,
                int(self._settings.hang_stack_seconds * 1e9),
                has_fallback=asker.has_fallback,
            )
            life = Life(rank, self._watch, self._exit_statuses, self._oom)
            self._followed[key] = Followed(rank, life, stacks)

    def _take_deaths(self) -> bool:
        any_death = False
        while not self._watch.deaths.empty():
            death = self._watch.deaths.get()
            followed = self._followed.get(death.key)
            if followed is not None:
                followed.life.died(death)
                any_death = True
        return any_death

    def _read(self, followed: Followed) -> None:
        """Read one rank. Files that make our code fail are left alone, the others go on."""
        followed.life.begin()
        gone = followed.life.is_gone
        if followed.failures >= _FAILURES_TO_ABANDON:
            followed.has_more, followed.is_drained = False, gone
            return
        try:
            followed.has_more = followed.rank.collect(self._once, gone=gone)
            followed.is_drained = gone and not followed.has_more
        except Exception as error:  # the guard of this thread: one rank must not cost the node
            followed.failures += 1
            logger.exception("reading %s failed", followed.rank.key)
            if followed.failures >= _FAILURES_TO_ABANDON:
                self._report_once(
                    "rank not followed",
                    {"directory": followed.rank.key, "reason": f"{type(error).__name__}: {error}"},
                )

    def _once_a_second(self) -> None:
        for followed in self._followed.values():
            followed.life.turn()
            if followed.life.is_elsewhere:
                reason = "the process is in another pid namespace: its heartbeat alone is watched"
                self._report_once("stacks skipped", {"rank": followed.rank.key, "reason": reason})
            if not followed.life.is_gone:
                processes = None if followed.life.is_elsewhere else self._processes
                state = followed.rank.state(processes, alive=True)
                if state is not None and not self.commands.is_recording(followed.rank.key):
                    state = msgspec.structs.replace(state, is_recording=False)
                if state is not None:
                    self._outbox.record(state)
            if not self._outbox.wants_chunks and followed.rank.journal.keep_bounded():
                self._ledger.add(
                    "journal", "no server: old segments deleted", 1,
                    attempt=followed.rank.attempt, rank=followed.rank.rank,
                )  # fmt: skip
        ranks = {key: followed.rank for key, followed in self._followed.items()}
        self._agreement.turn(
            (ranks[key].attempt, ranks[key].rank, look) for key, look in self._looks().items()
        )
        self._sampling.watch(
            RankProcess(rank.attempt, rank.rank, rank.pid, rank.training_thread)
            for rank in (
                followed.rank
                for followed in self._followed.values()
                if not followed.life.is_gone and not followed.life.is_elsewhere
            )
        )
        for news in self._sampling.news():
            self._report(news)
        self._ledger.add("samples", "collector late", self._sampling.take_dropped())
        while not self.found.empty():
            self._outbox.record(self.found.get())
        while not self.refused.empty():
            items, reason = self.refused.get()
            self._ledger.add("upload", reason, items)

    def _looks(self) -> dict[str, Look]:
        return {
            key: look
            for key, followed in self._followed.items()
            if not followed.life.is_gone and (look := followed.rank.look()) is not None
        }

    def _take_stacks(self) -> bool:
        any_taken = False
        now = time.monotonic_ns()
        looks = self._looks()
        hang_ns = self._settings.hang_stack_seconds * 1e9
        is_stuck = any(
            look.oldest_open_ns and now - look.oldest_open_ns > hang_ns for look in looks.values()
        )
        for key, look in looks.items():
            followed = self._followed[key]
            taken = followed.stacks.turn(look, now, is_stuck)
            followed.rank.stacks_offset = followed.stacks.offset
            if taken is not None:
                any_taken = True
                followed.rank.flight.incident(taken.reason)
                for command in taken.commands or (0,):
                    self._outbox.record(
                        schema.Stacks(
                            attempt=followed.rank.attempt,
                            rank=followed.rank.rank,
                            time_ns=time.time_ns(),
                            text=taken.text,
                            reason=taken.reason,
                            command=command,
                        )
                    )
        return any_taken

    def _end_the_gone(self) -> bool:
        """Report the ranks that are gone and read to the end."""
        any_ended = False
        for key, followed in list(self._followed.items()):
            if followed.rank.boot_id not in (b"", bytes(16), self._boot_id):
                self._report_once("rank not followed", {"directory": key, "reason": "other host"})
                self._leave(key)
                continue
            if not followed.is_drained:
                continue
            ending = followed.life.ending(wait_for_second_source=self._launchers.any_lives())
            if ending is None:
                continue
            state = followed.rank.state(None, alive=False)
            for record in (state, *followed.rank.last_errors(), ending):
                if record is not None:
                    self._outbox.record(record)
            if self._outbox.wants_chunks:
                self._chunk([followed.rank])
            self._leave(key)
            any_ended = True
        return any_ended

    def _leave(self, key: str) -> None:
        self._followed.pop(key).rank.close()
        self._finished[key] = False
        self._last_ended = time.monotonic()

    def _tidy(self) -> None:
        safe = self._outbox.safe()
        if safe is None:
            return
        journals = [(key, followed.rank.journal) for key, followed in self._followed.items()]
        try:
            for key, journal in [*journals, *self._launchers.journals().items()]:
                journal.committed(safe.files.get(key, RankOffsets()))
                journal.delete_sent()
            for key in safe.finished:
                if not self._finished.get(key, True):
                    (self._run_directory / key / rank_files.COLLECTED).touch()
                    self._finished[key] = True
        except OSError as error:  # a full disk: nothing is lost, it is tried again
            logger.warning("tidying up failed: %s", error)

    def _write_exit(self, pid: int, start_ticks: int, status: ExitStatus) -> None:
        """Keep what was seen of an exit, should this collector be killed before it is sent."""
        with contextlib.suppress(OSError):
            self._exit_statuses.write(pid, start_ticks, status)

    def _report_once(self, name: str, fields: dict[str, str]) -> None:
        key = f"{name} {sorted(fields.items())}"
        if key not in self._reported and len(self._reported) < 1000:
            self._reported.add(key)
            self._report(News(name, fields, time.time_ns()))

    def _report(self, news: News) -> None:
        level = logging.INFO if news.name in _ROUTINE else logging.WARNING
        logger.log(level, "%s: %s", news.name, news.fields)
        self._outbox.record(
            schema.Event(
                attempt=news.attempt,
                rank=news.rank,
                time_ns=news.time_ns,
                name=news.name,
                fields=news.fields,
            )
        )
