"""The one thread that writes: what waits together is committed together.

A caller gets a future; it is done only after the commit that holds its work. One job's failure
never takes another job with it: a failed group is rolled back and repeated job by job. A job
whose transaction PostgreSQL ended because this process stood still is repeated once.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from rankscope_server.problems import Problem
from rankscope_server.store.disk import Disk
from rankscope_server.store.engine import StoreUnavailableError, explain, is_rolled_back
from rankscope_server.store.leases import LeaseLostError
from rankscope_server.store.locks import take_locks
from rankscope_server.store.operations import committed_sums
from rankscope_server.store.tiles import committed_tiles
from rankscope_server.store.unit import Unit

_PAUSE_PER_SECOND = 4.0  # of a commit: the writer is busy a fifth of the time at most
_MAX_PAUSE_SECONDS = 0.4  # a batch waits for its answer half a second at most, with the commit
log = logging.getLogger(__name__)
T = TypeVar("T")
REFUSAL_LOG_SECONDS = 60.0
_URGENT_ROOM = 128  # more jobs that may wait where they are urgent
_URGENT, _BULK, _LAST = range(3)  # in this order what waits is done


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Work for one transaction, and what to do with its result once it is durable.

    `announce` says to the unit what the work will read, so that it is read for all jobs at once.
    """

    work: Callable[[Unit], T]
    after_commit: Callable[[T], None] | None = None
    locks: frozenset[str] = frozenset()
    announce: Callable[[Unit], None] | None = None
    future: Future[T] = field(default_factory=Future)


class Writer:
    """Owns the writing connection. `start` before the first `submit`, `close` at the end."""

    def __init__(
        self,
        engine: sa.Engine,
        group_size: int = 64,
        waiting: int = 1024,
        disk: Disk | None = None,
    ) -> None:
        self._engine, self._disk = engine, disk
        self._refusal, self._refusal_logged = "", 0.0
        self._group_size = max(1, group_size)
        # an embedded store has no other writer
        is_alone = engine.dialect.name == "sqlite"
        self._tiles = committed_tiles() if is_alone else None
        self._sums = committed_sums() if is_alone else None
        self._free_at = 0.0  # until then jobs wait for each other, unless a group is full
        self._waiting, self._numbers = waiting, itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Job[Any] | None]] = queue.PriorityQueue()
        self._thread = threading.Thread(target=self._work, name="rankscope-writer", daemon=True)
        self._closed = False

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Return how many jobs wait."""
        return self._queue.qsize()

    @property
    def is_alive(self) -> bool:
        """Return whether its thread works."""
        return self._thread.is_alive()

    @property
    def queue_ratio(self) -> float:
        """Return how full the queue is, 0-1."""
        return min(1.0, self._queue.qsize() / self._waiting)

    def submit(
        self,
        work: Callable[[Unit], T],
        after_commit: Callable[[T], None] | None = None,
        *,
        frees_space: bool = False,
        lock: str = "",
        locks: Iterable[str] = (),
        announce: Callable[[Unit], None] | None = None,
        is_urgent: bool = False,
    ) -> Future[T]:
        """Queue work; the future is done after its commit.

        `lock` names what the work reads, changes and writes: other processes that write it wait;
        `locks` the same of work on several things. What is urgent goes past what is not, and has
        room where that has none.
        Raises StoreUnavailableError where too much waits already, the server ends, or the disk is
        full and the work does not free space.
        """
        job = Job(work, after_commit, frozenset({*locks, lock} - {""}), announce)
        if self._closed:
            raise StoreUnavailableError(
                "the server is stopping", "send again to the next server", cause="stopping"
            )
        if self._disk is not None and not frees_space:
            self._disk.admit()
        if self._queue.qsize() >= self._waiting + (_URGENT_ROOM if is_urgent else 0):
            raise StoreUnavailableError(
                "the store is behind: too many batches wait", "send again later", cause="behind"
            )
        self._queue.put((_URGENT if is_urgent else _BULK, next(self._numbers), job))
        return job.future

    def run(
        self, work: Callable[[Unit], T], *, frees_space: bool = False, lock: str = "",
        is_urgent: bool = False,
    ) -> T:  # fmt: skip
        """Do work in a transaction and wait for its commit. Raises what the work raises."""
        return self.submit(work, frees_space=frees_space, lock=lock, is_urgent=is_urgent).result()

    def close(self, timeout_seconds: float = 3.0) -> None:
        """Finish what was queued, then stop."""
        self._closed = True
        self._queue.put((_LAST, next(self._numbers), None))
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while True:
            _, _, job = self._queue.get()
            if job is None:
                return
            group, last = [job], False
            while len(group) < self._group_size and not last:
                try:
                    _, _, following = self._queue.get(timeout=self._pause())
                except queue.Empty:
                    break
                if following is None:
                    last = True
                else:
                    group.append(following)
            # The job of a sender that went away is dropped; from here on none can be cancelled.
            group = [job for job in group if job.future.set_running_or_notify_cancel()]
            if group:
                self._commit(group)
            if last:
                return

    def _pause(self) -> float:
        """Return how many seconds to wait for one more job of a group."""
        return max(0.0, self._free_at - time.monotonic())

    def _commit(self, group: list[Job[Any]], *, is_again: bool = False) -> None:
        began = time.monotonic()
        try:
            results = self._transaction(group)
        except Exception as error:  # noqa: BLE001 - whatever a job raises belongs to its caller
            if len(group) > 1 or (is_rolled_back(error) and not is_again):
                for job in group:
                    self._commit([job], is_again=len(group) == 1)
                return
            group[0].future.set_exception(self._reason(error))
            return
        ended = time.monotonic()
        if len(group) > 1:
            # A commit costs nearly the same for many jobs as for few, so the longer one takes the
            # longer the next ones wait for each other; one that came alone waits for none.
            self._free_at = ended + min(_PAUSE_PER_SECOND * (ended - began), _MAX_PAUSE_SECONDS)
        for job, result in zip(group, results, strict=True):
            # Before the future: the next batch of this sender must find its effects in order.
            if job.after_commit is not None:
                job.after_commit(result)
            job.future.set_result(result)

    def _transaction(self, group: list[Job[Any]]) -> list[Any]:
        with self._engine.begin() as connection:
            take_locks(connection, frozenset().union(*(job.locks for job in group)))
            unit = Unit(connection, tiles=self._tiles, sums=self._sums)
            for job in group:
                if job.announce is not None:
                    job.announce(unit)
            results = [job.work(unit) for job in group]
            unit.flush()
        unit.committed()
        return results

    def _reason(self, error: Exception) -> Exception:
        # an answer to who asked, or another owner: no failure of the store
        if isinstance(error, Problem | LeaseLostError):
            return error
        reason = explain(error)
        if reason is None:
            log.error("a write failed", exc_info=error)
            return error
        now = time.monotonic()
        if str(reason) != self._refusal or now - self._refusal_logged > REFUSAL_LOG_SECONDS:
            self._refusal, self._refusal_logged = str(reason), now
            log.warning("the store refuses to write: %s", reason)
        if reason.cause == "disk_full" and self._disk is not None:
            self._disk.failed()
        return reason
