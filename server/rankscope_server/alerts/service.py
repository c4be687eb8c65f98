"""Alerts of one server: the threads that look, send and say that it is alive."""

from __future__ import annotations

import logging
import time
import uuid

import msgspec
import sqlalchemy as sa

from rankscope_server.alerts import from_file, store
from rankscope_server.alerts.deadman import DeadManSwitch
from rankscope_server.alerts.deliver import Deliverer
from rankscope_server.alerts.message import Message
from rankscope_server.alerts.reading import Delays, Reader
from rankscope_server.alerts.send import send
from rankscope_server.alerts.send.outbound import DeliveryError, Outbound
from rankscope_server.alerts.store import StoredChannel
from rankscope_server.alerts.watch import Watcher
from rankscope_server.settings import Settings, is_loopback
from rankscope_server.store import locks, tables
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import ALERTS, Held, Leases, said_of
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True):
    """How the work goes, as the process says that does it."""

    asked_ms: float | None = None  # when the dead-man switch was asked last
    deadman_problem: str = ""  # why it is not asked, or did not take it
    problem: str = ""  # of the last look at the rules


def _pass_on_nothing() -> None:
    pass


class Alerts:
    """Owns the threads. `start` and `close` once."""

    def __init__(
        self, settings: Settings, writer: Writer, reader: sa.Engine,
        delays: Delays, leases: Leases,
    ) -> None:  # fmt: skip
        def lease() -> Held | None:
            return leases.hold(ALERTS)

        self._lease, self.pass_on = lease, _pass_on_nothing
        url = sa.make_url(settings.address_of_database())
        is_embedded = url.get_backend_name() == "sqlite"
        self._writer, self._reader = writer, reader
        self._of_file = from_file.read(settings.file)
        self.outbound = Outbound(
            settings.public_url, settings.networks_of_alerts(), is_loopback(settings.host)
        )
        reading = Reader(
            horizon_seconds=settings.forget_after_seconds, pause_seconds=settings.look_seconds,
            delays=delays,
            store_path=str(url.database or "") if is_embedded else "",
            hearing_since_ns=time.time_ns(), prices=settings.price_list(),
        )  # fmt: skip
        self.deliverer = Deliverer(writer, reader, self.outbound, lease)
        self.watcher = Watcher(
            reading, writer, reader, settings.look_seconds, self.deliverer.wake, lease
        )
        self.deadman = DeadManSwitch(
            settings.deadman_url,
            settings.deadman_seconds,
            writer,
            self.outbound,
            {
                "the analysis": delays.analysis_seconds,
                "ingest": delays.intake_seconds,
                "alerting": lambda: self.watcher.behind_seconds,
            },
            lease,
        )

    def start(self) -> None:
        """Store what the server's file says; begin to look, to send, to say that it is alive."""
        self._store_file()
        self.deliverer.start()
        self.watcher.start()
        self.deadman.start()

    def _store_file(self) -> None:
        """Store the channels and rules of the file. A server with a full disk starts without."""
        given = self._of_file
        try:
            self._writer.run(
                lambda unit: store.put_file(unit, given.channels, given.rules), lock=locks.ALERTS
            )
        except StoreUnavailableError as error:
            log.warning("the alerts of the file are as they were: %s; %s, then start the server "
                        "again", error, error.remedy)  # fmt: skip

    def close(self) -> None:
        """Stop; what waits is sent by the next server."""
        self.deadman.close()
        self.watcher.close()
        self.deliverer.close()

    @property
    def is_alive(self) -> bool:
        """Return whether the threads that look and send work."""
        return self.watcher.is_alive and self.deliverer.is_alive

    def wake(self) -> None:
        """Say that a message waits, to whichever process sends it."""
        self.deliverer.wake()
        self.pass_on()

    @property
    def progress(self) -> Progress:
        """Return how the work of this process goes."""
        return Progress(self.deadman.asked_ms, self.deadman.problem, self.watcher.failure)

    def progress_of_owner(self, connection: sa.Connection) -> Progress:
        """Return how the work goes, also where another process does it."""
        said = said_of(connection, ALERTS) if self._lease() is None else None
        return self.progress if said is None else msgspec.convert(said, Progress)

    def num_messages(self, state: str) -> int:
        """Return how many stored messages are in a state."""
        table = tables.alert_delivery
        query = sa.select(sa.func.count()).select_from(table).where(table.c.state == state)
        with self._reader.connect() as connection:
            return int(connection.scalar(query) or 0)

    def try_channel(self, one: StoredChannel) -> int:
        """Send a test message once, whatever the quiet hours; return the id of its delivery."""
        now_ms = time.time() * 1e3
        message = Message(
            id=uuid.uuid4().hex, event="test", alert=f"test-{uuid.uuid4().hex}", rule="Test",
            severity="info", what=f"Test of the channel {one.name}",
            why="a person pressed the test button of Rankscope",
            next="nothing: alerts that are sent here arrive", path="alerts", opened_ms=now_ms,
            time_ms=now_ms,
        )  # fmt: skip
        state, note = "sent", ""
        try:
            send(one.target, message, self.outbound)
        except DeliveryError as error:
            state, note = "given_up", str(error)

        def work(unit: Unit) -> int:
            delivery_id = store.queue_message(unit, one, message)
            store.end_delivery(unit, delivery_id, state, note, 1)
            return delivery_id

        return self._writer.run(work, lock=locks.ALERTS)
