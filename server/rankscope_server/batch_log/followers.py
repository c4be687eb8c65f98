"""Workers: each partition is read in order and stored by the process that has its lease.

The position that was reached is written with what was read, in one transaction that holds the
lease: a repeat has no effect, and an owner that was stopped and is woken writes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import sqlalchemy as sa

from rankscope_server.batch_log.jetstream import Entry, JetStream
from rankscope_server.batch_log.partitions import Share, lease_of
from rankscope_server.batch_log.storing import OnStored, store_sent
from rankscope_server.batch_log.validating import Prepared, Validator
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.ingest.intake import Intake
from rankscope_server.ingest.records import Refused
from rankscope_server.problems import Problem
from rankscope_server.store.batches import Journal, Stored
from rankscope_server.store.engine import StoreUnavailableError, explain
from rankscope_server.store.leases import Held, LeaseLostError, applied_of
from rankscope_server.store.locks import of_run
from rankscope_server.store.shared_leases import SharedLeases
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
_IDLE_SECONDS = 0.1  # until a partition is looked at again that has nothing more
_PAUSE_SECONDS = 0.5  # where it is another worker's, or something cannot be reached
_FORGET_SECONDS = 10.0  # between two times that what is stored leaves the log
Read: TypeAlias = tuple[int, Entry, Prepared]


@dataclass(frozen=True, slots=True)
class Parts:
    """What followers work with."""

    streams: JetStream
    leases: SharedLeases
    share: Share
    reader: sa.Engine
    writer: Writer
    validator: Validator
    intake: Intake
    on_stored: OnStored
    on_rejected: Callable[[], None]


class Followers:
    """One thread for each partition. `start` and `close` once."""

    def __init__(self, parts: Parts) -> None:
        self._share, self._stop = parts.share, threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work, args=(Follower(number, parts),), daemon=True,
                name=f"rankscope-partition-{number}",
            )
            for number in range(parts.streams.num_partitions)
        ]  # fmt: skip

    def start(self) -> None:
        """Begin to follow what is ours."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Finish what is read; the next owner reads on from there."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """Return whether all threads work."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self, follower: Follower) -> None:
        while not self._stop.is_set():
            pause = _PAUSE_SECONDS
            try:
                if self._share.has(follower.number):
                    pause = follower.turn()
                else:
                    follower.leave()
            except StoreUnavailableError as error:
                log.info("partition %d waits: %s", follower.number, error)
            except LeaseLostError as error:
                log.warning("%s; what was read of it is not written", error)
            except Exception as error:
                known = explain(error)
                log.error("partition %d waits: %s", follower.number, known or error,
                          exc_info=None if known else error)  # fmt: skip
            self._stop.wait(pause)


class Follower:
    """Reads one partition and stores what is in it; for one thread."""

    def __init__(self, number: int, parts: Parts) -> None:
        self.number, self._parts, self._name = number, parts, lease_of(number)
        self._held: Held | None = None
        self._applied = 0  # under that lease
        self._forgotten, self._forget_at = 0, 0.0

    def leave(self) -> None:
        """Let another process have it; again and again, as the analysis may ask for it late."""
        self._held = None
        self._parts.leases.release(self._name)

    def turn(self) -> float:
        """Store what comes next; return how many seconds to wait before the next turn.

        Raises StoreUnavailableError, LeaseLostError.
        """
        parts = self._parts
        held = parts.leases.hold(self._name)
        if held is None:
            return _PAUSE_SECONDS
        if held != self._held:
            with parts.reader.connect() as connection:
                self._applied = applied_of(connection, self._name)
            self._held = held
        found = parts.streams.read(self.number, self._applied)
        if not found:
            self._forget()
            return _IDLE_SECONDS
        if found[0][0] > self._applied + 1 and not self._is_first(found[0][0]):
            return _IDLE_SECONDS  # a server of the log that is behind the others
        self._store(held, self._validated(found))
        return 0.0

    def _is_first(self, position: int) -> bool:
        """Return whether nothing before a position is in the log, wherever it went."""
        is_first = position <= self._parts.streams.first_position(self.number)
        if is_first and self._applied:
            log.warning(
                "partition %d of the log begins anew: what it lost is sent again by collectors "
                "that still hold it", self.number,
            )  # fmt: skip
        return is_first

    def _validated(self, found: Sequence[tuple[int, Entry]]) -> list[Read]:
        waiting = [
            self._parts.validator.submit(entry.body, entry.encoding, takes_commands=False)
            for _, entry in found
        ]
        return [
            (position, entry, _result(future, entry))
            for (position, entry), future in zip(found, waiting, strict=True)
        ]

    def _store(self, held: Held, group: Sequence[Read]) -> None:
        try:
            self._commit(held, group)
        except (StoreUnavailableError, LeaseLostError):
            raise
        except Exception as error:
            if explain(error) is not None:
                raise
            if len(group) > 1:
                for one in group:
                    self._store(held, [one])
                return
            # A defect of ours: it must hold up neither this run nor the others.
            (position, entry, prepared), reason = group[0], f"{type(error).__name__}: {error}"
            log.error("batch %d of %s cannot be stored", entry.sequence, entry.producer,
                      exc_info=error)  # fmt: skip
            self._commit(held, [(position, entry, _refused(prepared.batch, reason))])

    def _commit(self, held: Held, group: Sequence[Read]) -> None:
        def work(unit: Unit) -> list[Stored | Problem]:
            held.advance(unit.connection, group[-1][0])
            return [store_sent(unit, prepared, entry.project) for _, entry, prepared in group]

        def announce(unit: Unit) -> None:
            for _, _, prepared in group:
                unit.run(prepared.batch.run_id).want(prepared.batch)

        def after_commit(results: list[Stored | Problem]) -> None:
            for (_, entry, prepared), result in zip(group, results, strict=True):
                self._note(entry, prepared, result)

        locks = {of_run(prepared.batch.run_id) for _, _, prepared in group}
        self._parts.writer.submit(work, after_commit, locks=locks, announce=announce).result()
        self._applied = group[-1][0]

    def _note(self, entry: Entry, prepared: Prepared, result: Stored | Problem) -> None:
        if isinstance(result, Problem):
            self._parts.on_rejected()
            log.info("batch %d of %s is refused: %s", entry.sequence, entry.producer, result.what)
            return
        if entry.waited_ns >= 0:
            waited_ns = entry.waited_ns + max(time.time_ns() - entry.appended_ns, 0)
            self._parts.intake.waited(entry.run_id, entry.producer, waited_ns / 1e9)
        self._parts.on_stored(prepared.batch, result)

    def _forget(self) -> None:
        """Remove from the log what is in the store, once in a while, when there is time."""
        now = time.monotonic()
        if self._applied > self._forgotten and now >= self._forget_at:
            self._forget_at = now + _FORGET_SECONDS
            self._parts.streams.forget(self.number, self._applied)
            self._forgotten = self._applied


def _result(future: Future[Prepared], entry: Entry) -> Prepared:
    """Return a batch as it can be stored; one that cannot be read has nothing but its number."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, StoreUnavailableError):
        raise error
    batch = ValidatedBatch(
        entry.run_id, entry.producer, entry.sequence, "", len(entry.body), [], [], []
    )
    return _refused(batch, str(error))


def _refused(batch: ValidatedBatch, reason: str) -> Prepared:
    """Return a batch of which all is refused: its number and how much it was are stored."""
    why = Refused(index=0, kind=None, field=None, reason=reason, remedy="update the server")
    number = max(len(batch.records) + len(batch.chunks) + len(batch.refused), 1)
    empty = dataclasses.replace(batch, records=[], chunks=[], refused=[why] * number)
    return Prepared(empty, Journal(None, {}))
