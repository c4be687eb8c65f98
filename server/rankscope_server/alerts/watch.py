"""Looks at the rules once a second, in a thread of its own, and stores what becomes of alerts."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import sqlalchemy as sa

from rankscope_server.alerts import store
from rankscope_server.alerts.changes import Change, OpenAlert, advance, clear_since
from rankscope_server.alerts.evaluate import Outcome, evaluate, gone
from rankscope_server.alerts.reading import Reader
from rankscope_server.alerts.rules import OnBudget, OnDisk, OnLoss, OnSilence
from rankscope_server.alerts.seen import Seen
from rankscope_server.alerts.store import StoredRule, key_of
from rankscope_server.store import tables
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import Held, LeaseLostError
from rankscope_server.store.locks import ALERTS
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
_FORGET_EVERY = 3_600.0  # seconds
Decided = list[tuple[StoredRule | None, str, Change, OpenAlert | None]]


class Watcher:
    """Owns what is remembered from look to look. `start` and `close` once; `on_change` is called
    after messages were stored."""

    def __init__(
        self, reading: Reader, writer: Writer, reader: sa.Engine, pause_seconds: float,
        on_change: Callable[[], None], lease: Callable[[], Held | None],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._lease = lease
        self._reading, self._writer, self._reader = reading, writer, reader
        self._pause_seconds, self._on_change, self._clock = pause_seconds, on_change, clock
        self._clear_since: dict[str, int] = {}
        self._store_seconds = 0.0
        self._forgot = 0.0
        self.failure = ""  # of the last look
        self._looked = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-alerts", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread works."""
        return self._thread.is_alive()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    @property
    def behind_seconds(self) -> float:
        """Return for how long no look at the rules has come to its end."""
        return max(0.0, time.monotonic() - self._looked - self._pause_seconds)

    def look_now(self) -> None:
        """Look once, unless another process does; for tests and for the thread."""
        lease = self._lease()
        if lease is None:
            self._clear_since = {}
            self._looked = time.monotonic()
            return
        now_ns = self._clock()
        with self._reader.connect() as connection:
            rules = store.rules(connection)
            known = store.open_alerts(connection)
            seen = self._reading.read(
                connection,
                now_ns,
                self._store_seconds,
                least_silence_seconds(rules),
                with_spent=any(isinstance(one.rule.when, OnBudget) for one in rules),
                with_losses=any(isinstance(one.rule.when, OnLoss) for one in rules),
                with_size=any(isinstance(one.rule.when, OnDisk) for one in rules),
            )
            deleted = _of_deleted_runs(connection, known, seen)
        self._store_seconds = 0.0
        outcomes, owners = outcomes_of(rules, seen, known, deleted)
        decided = self._decide(outcomes, owners, known, now_ns)
        if decided or time.monotonic() - self._forgot > _FORGET_EVERY:
            self._store(decided, lease)
        self._looked = time.monotonic()

    def _decide(
        self, outcomes: dict[str, Outcome], owners: dict[str, StoredRule],
        known: dict[str, OpenAlert], now_ns: int,
    ) -> Decided:  # fmt: skip
        decided: Decided = []
        since: dict[str, int] = {}
        for key in sorted(outcomes.keys() | known.keys()):
            alert = known.get(key)
            if alert is not None:
                alert = replace(alert, clear_since_ns=self._clear_since.get(key, 0))
                since[key] = clear_since(alert, outcomes.get(key), now_ns)
                alert = replace(alert, clear_since_ns=since[key])
            change = advance(alert, outcomes.get(key), now_ns)
            if change is not None:
                decided.append((owners.get(key), key, change, alert))
        self._clear_since = since
        return decided

    def _store(self, decided: Decided, lease: Held) -> None:
        def work(unit: Unit) -> None:
            lease.check(unit.connection)
            for rule, key, change, alert in decided:
                store.store_change(unit, rule, key, change, alert)
            store.forget_old(unit)

        began = time.monotonic()
        self._store_seconds = math.inf  # where it refuses
        self._writer.run(work, lock=ALERTS)
        self._store_seconds, self._forgot = time.monotonic() - began, began
        if decided:
            self._on_change()

    def _work(self) -> None:
        while not self._stop.wait(self._pause_seconds):
            try:
                self.look_now()
                self.failure = ""
            except StoreUnavailableError as error:
                self._failed(f"alerts wait: {error}", None)
            except LeaseLostError as error:
                log.warning("%s; it decides on alerts now", error)
                self._store_seconds = 0.0
            except Exception as error:  # noqa: BLE001 - alerts must not end with one bad look
                self._failed(f"{type(error).__name__}: {error}", error)

    def _failed(self, text: str, error: Exception | None) -> None:
        if text != self.failure:  # once, not with every look
            self.failure = text
            level = logging.WARNING if error is None else logging.ERROR
            log.log(level, "a look at the alert rules failed: %s", text, exc_info=error)


def least_silence_seconds(rules: list[StoredRule]) -> float | None:
    """Return the least that a rule calls silence, None where no rule is about it."""
    whens = [one.rule.when for one in rules if one.rule.is_enabled]
    return min((when.seconds for when in whens if isinstance(when, OnSilence)), default=None)


def outcomes_of(
    rules: list[StoredRule], seen: Seen, known: dict[str, OpenAlert], deleted: set[str]
) -> tuple[dict[str, Outcome], dict[str, StoredRule]]:
    """Return what all rules say, and whose word it is, by key. Pure.

    Open alerts of rules that are switched off, and of runs that are `deleted`, are to be closed.
    """
    outcomes: dict[str, Outcome] = {}
    owners: dict[str, StoredRule] = {}
    active = {rule.id: rule for rule in rules if rule.rule.is_enabled}
    for rule in active.values():
        for subject, outcome in evaluate(rule.rule, seen).items():
            key = key_of(rule.id, subject)
            outcomes[key], owners[key] = outcome, rule
    for key in known:
        rule_id = int(key.partition("/")[0])
        if rule_id not in active:
            outcomes[key] = gone("its rule was deleted or switched off")
        elif key in deleted:
            outcomes[key] = gone("its run was deleted")
    return outcomes, owners


def _of_deleted_runs(
    connection: sa.Connection, known: dict[str, OpenAlert], seen: Seen
) -> set[str]:
    """Return the keys of open alerts about runs that are in the store no more."""
    if not known:
        return set()
    alert, run = tables.alert.c, tables.run.c
    there = {one.run_id for one in seen.runs}
    rows = connection.execute(
        sa.select(alert.open_key, alert.run_id)
        .outerjoin(tables.run, run.run_id == alert.run_id)
        .where(alert.open_key.is_not(None), alert.run_id != "", run.run_id.is_(None))
    )
    return {key for key, run_id in rows if run_id not in there}
