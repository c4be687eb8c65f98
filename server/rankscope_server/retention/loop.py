"""Does the work of retention in a thread of its own, one run at a time.

Each turn is one short transaction of the writer; between turns the thread rests as long as the
turn took, so that batches come in between. What was begun is found in the store after any death.
Of several processes on one store one does it; what the others are asked for, they pass on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from rankscope_server.broker import Broker
from rankscope_server.problems import Problem
from rankscope_server.retention.compaction import MeanwhileError, put_in_place, segments_of
from rankscope_server.retention.dropped import delete_dropped, sweep
from rankscope_server.retention.kinds import RAW_PARTS, Kind, Part, RawKind, parts_of_run
from rankscope_server.retention.marks import mark
from rankscope_server.retention.plan import Removal, Rules, plan, rules_of
from rankscope_server.retention.removal import finish_run, remove_of_run, remove_raw
from rankscope_server.retention.sizes import Counted, Size, count, save
from rankscope_server.retention.space import Space
from rankscope_server.settings import Settings
from rankscope_server.store import deletion, tables
from rankscope_server.store.blobs import CAUSE, IN_ROWS, Blobs
from rankscope_server.store.disk import Disk
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import RETENTION, Held, LeaseLostError, Leases, said_of
from rankscope_server.store.locks import of_run
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
_Done = TypeVar("_Done")
FIRST_ROWS, MOST_ROWS = 64, 4_096
TURN_SECONDS = 0.02  # what a batch that comes at the wrong moment waits longer
_WAL_PAUSE_SECONDS = 0.5
_COUNTING_SHARE = 5  # a page that is open counts again after so many times what it took
_FULL_SECONDS = 5.0  # between two rounds on a full disk: what was live may go by then
_SWEEP_SECONDS = 6 * 3600.0  # to list all objects takes a request for each thousand
_SHARED_SECONDS = 5.0  # between two looks at what other processes were asked for
ROUND, DELETION = "round", "deletion"  # what is asked for
_NOT_COUNTED: tuple[float, Counted | None] = (0.0, None)  # until when a count holds, and it


@dataclass(frozen=True, slots=True)
class Progress:
    """What the thread does now, or did last."""

    state: str = "idle"  # idle, counting, removing, giving back
    run_id: str = ""
    kind: str = ""
    rows: int = 0  # removed of `rows_to_go`
    rows_to_go: int = 0
    began_ns: int = 0
    round_ended_ns: int = 0
    failure: str = ""


class RetentionLoop:
    """Owns the thread. `start` and `close` once; the rest from any thread."""

    def __init__(
        self,
        settings: Settings,
        writer: Writer,
        reader: sa.Engine,
        broker: Broker,
        disk: Disk,
        leases: Leases,
        blobs: Blobs = IN_ROWS,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings, self._writer, self._reader = settings, writer, reader
        self._broker, self._disk, self._clock = broker, disk, clock
        self._leases, self._blobs = leases, blobs
        self._sweep_due = 0.0  # orphans of before a restart
        self.rules: Rules = rules_of(settings)
        self.space = Space(writer, reader, disk)
        self.progress = Progress()
        self._newest_count = _NOT_COUNTED
        self.removed_rows: Counter[str] = Counter()
        self.removed_bytes: Counter[str] = Counter()
        self.on_deleted: Callable[[str], None] = lambda run_id: None
        self.pass_on: Callable[[frozenset[str]], None] = lambda asked: None  # to the other process
        self._wake, self._stop = threading.Event(), threading.Event()
        self._asked: deque[str] = deque()
        # A server that was killed may have left pages to give back.
        self._touched = {"?"} if reader.dialect.name == "sqlite" else set[str]()
        self._thread = threading.Thread(target=self._work, name="rankscope-retention", daemon=True)
        disk.on_full = self.wake

    def start(self) -> None:
        """Go on with what was begun, then work in rounds."""
        self._wake.set()
        self._thread.start()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Stop after the turn that is under way."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """Return whether the thread works."""
        return self._thread.is_alive()

    def wake(self, asked: Collection[str] = (ROUND,)) -> None:
        """Begin a round now, or go on with deletions."""
        self._asked.extend(asked)  # from any thread: none is lost
        self._wake.set()

    def delete(self, run_id: str, reason: str = "asked") -> None:
        """Mark a run as deleted: from now on it is refused and not shown; its data follows.

        Raises Problem 404, 409, 410; StoreUnavailableError.
        """
        with self._reader.connect() as connection:
            kinds = count(connection, self._clock()).sizes.get(run_id, {})
        rows = sum(size.rows for size in kinds.values())
        num_bytes = sum(size.bytes for size in kinds.values())
        live_after_ns = self._clock() - self.rules.live_ns
        self._disk.release()
        self._writer.run(
            lambda unit: deletion.begin(unit, run_id, reason, live_after_ns, rows, num_bytes),
            frees_space=True,
            lock=of_run(run_id),
        )
        self._newest_count = _NOT_COUNTED
        self.on_deleted(run_id)
        self._broker.publish("runs", {"runs"}, None)
        self._broker.publish(f"run:{run_id}", {"run"}, None)
        self.wake((DELETION,))

    def progress_of_owner(self, connection: sa.Connection) -> Progress:
        """Return how the work goes, also where another process does it."""
        said = said_of(connection, RETENTION) if self._lease() is None else None
        return self.progress if said is None else msgspec.convert(said, Progress)

    def counted(self) -> Counted:
        """Return what is stored now, or lately: to count takes a small share of the time."""
        began = time.monotonic()
        until, counted = self._newest_count
        if counted is None or began > until:
            with self._reader.connect() as connection:
                counted = count(connection, self._clock())
            ended = time.monotonic()
            self._newest_count = (ended + min(_COUNTING_SHARE * (ended - began), 60.0), counted)
        return counted

    def planned(self, counted: Counted) -> list[Removal]:
        """Return what a round would remove now."""
        with self._reader.connect() as connection:
            return plan(connection, self.rules, counted.sizes, self._clock())

    def round(self) -> None:
        """Do all that is to do now; for the thread and for tests."""
        self._show(state="counting", began_ns=self._clock(), failure="")
        self._finish_deletions()
        if not self._disk.full():  # neither is needed to remove
            self._write(mark)
            with self._reader.connect() as connection:
                counted = count(connection, self._clock())
            self._write(lambda unit: save(unit, counted))
        with self._reader.connect() as connection:
            counted = count(connection, self._clock())
        for removal in self.planned(counted) if self.rules.are_any else ():
            if self._stop.is_set():
                return
            self._disk.release()
            if removal.kind == "run":
                self._delete_by_rule(removal)
            else:
                self._remove(removal, removal.kind)
        if self._settings.segments:
            self._compact()
        self._give_back()
        self._delete_objects(with_orphans=True)
        self._newest_count = _NOT_COUNTED
        self._show(state="idle", run_id="", kind="", round_ended_ns=self._clock())

    def _work(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            self._wake.clear()
            asked = frozenset(self._asked.popleft() for _ in range(len(self._asked)))
            if self._lease() is None:
                if asked:
                    self.pass_on(asked)
                self._wake.wait(_SHARED_SECONDS)
                continue
            try:
                if ROUND in asked or time.monotonic() >= due:
                    due = time.monotonic() + self._settings.retention_seconds
                    self.round()
                else:
                    self._finish_deletions()
                    self._give_back()
                    self._delete_objects()
            except StoreUnavailableError as error:
                self._failed(str(error))
            except LeaseLostError as error:
                log.warning("%s; it goes on with retention", error)
            except Exception as error:
                log.error("retention failed", exc_info=error)
                self._failed(f"{type(error).__name__}: {error}")
            self._disk.restore()
            if self._disk.full():
                due = min(due, time.monotonic() + _FULL_SECONDS)
            pause_s = max(0.0, due - time.monotonic())
            self._wake.wait(min(pause_s, _SHARED_SECONDS) if self._leases.is_shared else pause_s)

    def _lease(self) -> Held | None:
        return self._leases.hold(RETENTION)

    def _write(
        self, work: Callable[[Unit], _Done], run_id: str = "", *, frees_space: bool = False
    ) -> _Done:
        """Do work in a transaction, while this process is the one that removes."""
        lease = self._lease()
        if lease is None:
            raise LeaseLostError("the lease of retention is not held now")

        def checked(unit: Unit) -> _Done:
            lease.check(unit.connection)
            return work(unit)

        lock = of_run(run_id) if run_id else ""
        return self._writer.run(checked, frees_space=frees_space, lock=lock)

    def _failed(self, why: str) -> None:
        self._show(state="idle", failure=why)
        self._stop.wait(1.0)
        self._wake.set()

    def _finish_deletions(self) -> None:
        table = tables.deletion
        while not self._stop.is_set():
            with self._reader.connect() as connection:
                row = connection.execute(
                    sa.select(table)
                    .where(table.c.finished_ns.is_(None))
                    .order_by(table.c.asked_ns)
                    .limit(1)
                ).first()
            if row is None:
                return
            self._finish(row.run_id, row.rows_at_start, row.rows)

    def _finish(self, run_id: str, rows_to_go: int, rows: int) -> None:
        self._disk.release()
        self._show(state="removing", run_id=run_id, kind="run", rows_to_go=rows_to_go, rows=rows)
        for kind, part in parts_of_run():
            self._touched.add(part.table.name)
            self._turns(run_id, kind, partial(remove_of_run, run_id=run_id, part=part))
        if not self._stop.is_set():
            self._write(lambda unit: finish_run(unit, run_id), run_id, frees_space=True)
        self._newest_count = _NOT_COUNTED
        self._broker.publish("runs", {"runs"}, None)

    def _delete_by_rule(self, removal: Removal) -> None:
        log.warning(
            "run %s is deleted: %s by --keep-runs (%d bytes)",
            removal.run_id, removal.reason, removal.bytes,
        )  # fmt: skip
        try:
            self.delete(removal.run_id, removal.reason)
        except Problem as problem:  # a batch, a pin or a person came first
            log.info("run %s stays: %s", removal.run_id, problem)
            return
        self._finish_deletions()

    def _remove(self, removal: Removal, kind: RawKind) -> None:
        self._show(
            state="removing", run_id=removal.run_id, kind=kind, rows=0, rows_to_go=removal.rows
        )
        for part in RAW_PARTS[kind]:
            self._touched.add(part.table.name)
            self._remove_part(removal, kind, part)
        log.info(
            "%d rows, %d bytes of %s of run %s were removed by %s",
            removal.rows, removal.bytes, kind, removal.run_id, removal.reason,
        )  # fmt: skip
        self._broker.publish(f"run:{removal.run_id}", {kind, "run"}, None)

    def _remove_part(self, removal: Removal, kind: RawKind, part: Part) -> None:
        def work(unit: Unit, most: int) -> Size:
            if deletion.is_pinned(unit.connection, removal.run_id):
                return Size()  # since the plan was made
            return remove_raw(unit, removal.run_id, kind, part, removal.cut, most)

        self._turns(removal.run_id, kind, work)

    def _turns(self, run_id: str, kind: Kind, work: Callable[..., Size]) -> None:
        """Do turns of a growing or shrinking size until one finds too little, or the server stops.

        `work(unit, most=)` removes so many rows.
        """
        most = FIRST_ROWS
        while not self._stop.is_set():
            if not self.space.wal_has_room():
                self._stop.wait(_WAL_PAUSE_SECONDS)
                continue
            size, took = self._write(partial(_timed, work, most), run_id, frees_space=True)
            self.removed_rows[kind] += size.rows
            self.removed_bytes[kind] += size.bytes
            self._show(rows=self.progress.rows + size.rows)
            if size.rows < most:
                return
            if self._disk.full():  # what a turn writes must fit into the reserve
                most = FIRST_ROWS
            elif took < TURN_SECONDS / 2:
                most = min(MOST_ROWS, most * 2)
            elif took > TURN_SECONDS * 2:
                most = max(1, most // 2)
            self._stop.wait(min(took, 1.0))

    def _give_back(self) -> None:
        if not self._touched:
            return
        self._show(state="giving back", run_id="", kind="")
        self.space.give_back(self._touched, lambda: not self._stop.is_set())
        self._touched = set()
        self._show(state="idle")

    def _compact(self) -> None:
        """Put old chunks together; what a store that is away takes no part of is tried again."""
        try:
            with self._reader.connect() as connection:
                for made in segments_of(connection, self.rules, self._clock(), self._blobs):
                    try:
                        self._write(partial(put_in_place, made=made), made.run_id)
                    except MeanwhileError as error:  # its object is swept
                        log.info("%s", error)
                    if self._stop.is_set():
                        return
        except StoreUnavailableError as error:
            if error.cause != CAUSE:
                raise
            log.warning("chunks stay as they are for now: %s", error)

    def _delete_objects(self, *, with_orphans: bool = False) -> None:
        """Delete the objects of which the rows are gone; a store that is away is asked again."""
        now_ns = self._clock()
        try:
            delete_dropped(
                self._reader, lambda work: self._write(work, frees_space=True), self._blobs, now_ns
            )
            if with_orphans and time.monotonic() >= self._sweep_due:
                num_orphans = sweep(self._reader, self._blobs, now_ns)
                if num_orphans:
                    log.info("%d objects without a row were deleted", num_orphans)
                self._sweep_due = time.monotonic() + _SWEEP_SECONDS
        except StoreUnavailableError as error:
            if error.cause != CAUSE:
                raise
            log.warning("objects stay for now: %s", error)

    def _show(self, **changes: object) -> None:
        self.progress = dataclasses.replace(self.progress, **changes)  # type: ignore[arg-type]


def _timed(work: Callable[..., Size], most: int, unit: Unit) -> tuple[Size, float]:
    began = time.monotonic()
    return work(unit, most=most), time.monotonic() - began
