"""The life of each followed process: watched, gone, read to the end, reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankscope.files import ring
from rankscope.node.processes.exits import ExitStatus, ExitStatuses, OomWatch, reason_of
from rankscope.node.processes.liveness import Death, DeathWatch
from rankscope.node.processes.stacks import StackTaker
from rankscope.node.ranks.rank import FollowedRank
from rankscope.wire import schema

SECOND_SOURCE_SECONDS = 1.5  # torchrun's own report comes within its polling interval
# Where a process cannot be seen and locks say nothing, it must show itself by its heartbeat.
_UNSEEN_SECONDS = 2.0
_SILENT_SECONDS = 600.0  # and counts as gone when it has not for so long
_NO_HEADER_SECONDS = 1.0
_OOM_WINDOW_SECONDS = 15.0


class Life:
    """Whether one rank lives, and how it ended."""

    def __init__(
        self,
        rank: FollowedRank,
        watch: DeathWatch,
        exit_statuses: ExitStatuses,
        oom: OomWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.is_gone = False
        self.is_elsewhere = False  # in another pid namespace: alive, by its files or its heartbeat
        self._watch = watch
        self._exit_statuses = exit_statuses
        self._oom = oom
        self._clock = clock
        self._begun = clock()
        self._is_watched = False
        self._heartbeat = (0, 0.0)  # value, when it changed last
        self._gone_at = 0.0
        self._gone_ns = 0
        self._status: ExitStatus | None = None
        self._counter: Path | None = None
        self._kills: deque[tuple[float, int]] = deque()

    def turn(self) -> None:
        """Look at what moves slowly; to be called about once a second."""
        if self._is_watched and not self.is_gone:
            self._count_kills()

    def begin(self) -> None:
        """Begin to watch the process as soon as it is known who it is."""
        if self.is_gone or self._is_watched:
            return
        rank, now = self.rank, self._clock()
        if not rank.has_header and now - self._begun < _NO_HEADER_SECONDS:
            return
        if rank.start_ticks and self._watch.watch(rank.key, rank.pid, rank.start_ticks):
            self._is_watched = True
            self._counter = self._oom.counter_of(rank.pid)
            self._count_kills()
            return
        self._look_at_unseen(now)

    def died(self, death: Death) -> None:
        """Take note of the death that the watch has seen."""
        self._go(death.time_ns, death.status)

    def ending(self, wait_for_second_source: bool) -> schema.RankEnded | None:
        """Return the record of the end, None while a second source may still report more."""
        rank = self.rank
        status = self._status or self._exit_statuses.find(rank.pid, rank.start_ticks)
        waited = self._clock() - self._gone_at > SECOND_SOURCE_SECONDS
        if status is None and rank.ended == ring.RUNNING and wait_for_second_source and not waited:
            return None
        reason, detail = reason_of(rank.ended, status)
        if reason == "lost" and self.is_elsewhere:
            seen = "its files are no longer held"
            if rank.is_held() is None:
                seen = f"it gave no sign of life for {_SILENT_SECONDS:.0f} s"
            detail = f"the process cannot be seen from here (another pid namespace), and {seen}"
        if status is not None and status.signal == 9 and self._kills_around_death():
            where = "cgroup's" if self._counter else "host's"
            detail += f"; the {where} OOM killer fired"
        return rank.end_record(self._gone_ns, reason, detail, status)

    def _look_at_unseen(self, now: float) -> None:
        """Distinguish a process that is dead from one that lives in another pid namespace."""
        rank, is_held = self.rank, self.rank.is_held()
        value, changed_at = self._heartbeat
        if not rank.has_header or self._exit_statuses.find(rank.pid, rank.start_ticks) is not None:
            self._go(time.time_ns(), None)
        elif is_held is not None:
            self.is_elsewhere = True
            if not is_held:
                self._go(time.time_ns(), None)
        elif rank.heartbeat_ns() != value:
            self.is_elsewhere = changed_at > 0.0  # it moved while we looked
            self._heartbeat = (rank.heartbeat_ns(), now)
        elif rank.ended != ring.RUNNING:
            self._go(time.time_ns(), None)
        elif now - changed_at > (_SILENT_SECONDS if self.is_elsewhere else _UNSEEN_SECONDS):
            self._go(time.time_ns(), None)

    def _go(self, time_ns: int, status: ExitStatus | None) -> None:
        self.is_gone = True
        self._gone_at, self._gone_ns, self._status = self._clock(), time_ns, status
        self._count_kills()

    def _count_kills(self) -> None:
        now = self._clock()
        self._kills.append((now, self._oom.count(self._counter)))
        while now - self._kills[0][0] > _OOM_WINDOW_SECONDS:
            self._kills.popleft()

    def _kills_around_death(self) -> bool:
        return self._kills[-1][1] > self._kills[0][1]


@dataclass
class Followed:
    """One rank: its files, its life, its stacks."""

    rank: FollowedRank
    life: Life
    stacks: StackTaker
    failures: int = 0
    has_more: bool = False
    is_drained: bool = False  # gone, and read to the end
