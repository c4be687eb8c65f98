"""The one thread that writes: what waits together is committed together.

A caller gets a future; it is done only after the commit that holds its work. One job's failure
never takes another job with it: a failed group is rolled back and repeated job by job.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from rankscope_server.problems import Problem
from rankscope_server.store.engine import StoreUnavailableError, explain
from rankscope_server.store.unit import Unit

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Work for one transaction, and what to do with its result once it is durable."""

    work: Callable[[Unit], T]
    after_commit: Callable[[T], None] | None = None
    future: Future[T] = field(default_factory=Future)


class Writer:
    """Owns the writing connection. `start` before the first `submit`, `close` at the end."""

    def __init__(self, engine: sa.Engine, group_size: int = 64, waiting: int = 1024) -> None:
        self._engine = engine
        self._group_size = max(1, group_size)
        self._queue: queue.Queue[Job[Any] | None] = queue.Queue(maxsize=waiting)
        self._thread = threading.Thread(target=self._work, name="rankscope-writer", daemon=True)
        self._closed = False

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(
        self, work: Callable[[Unit], T], after_commit: Callable[[T], None] | None = None
    ) -> Future[T]:
        """Queue work; the future is done after its commit.

        Raises StoreUnavailableError where too much waits already or the server ends.
        """
        job = Job(work, after_commit)
        if self._closed:
            raise StoreUnavailableError("the server is stopping", "send again to the next server")
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise StoreUnavailableError(
                "the store is behind: too many batches wait", "send again later"
            ) from None
        return job.future

    def run(self, work: Callable[[Unit], T]) -> T:
        """Do work in a transaction and wait for its commit. Raises what the work raises."""
        return self.submit(work).result()

    def close(self, timeout_seconds: float = 3.0) -> None:
        """Finish what was queued, then stop."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            group, last = [job], False
            while len(group) < self._group_size and not last:
                try:
                    following = self._queue.get_nowait()
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

    def _commit(self, group: list[Job[Any]]) -> None:
        try:
            results = self._transaction(group)
        except Exception as error:  # noqa: BLE001 - whatever a job raises belongs to its caller
            if len(group) > 1:
                for job in group:
                    self._commit([job])
                return
            group[0].future.set_exception(self._reason(error))
            return
        for job, result in zip(group, results, strict=True):
            # Before the future: the next batch of this sender must find its effects in order.
            if job.after_commit is not None:
                job.after_commit(result)
            job.future.set_result(result)

    def _transaction(self, group: list[Job[Any]]) -> list[Any]:
        with self._engine.begin() as connection:
            unit = Unit(connection)
            results = [job.work(unit) for job in group]
            unit.flush()
        return results

    def _reason(self, error: Exception) -> Exception:
        if isinstance(error, Problem):  # an answer, no failure of the store
            return error
        reason = explain(error)
        if reason is None:
            log.error("a write failed", exc_info=error)
            return error
        log.warning("the store refuses to write: %s", reason)
        return reason
