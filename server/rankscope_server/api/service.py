"""What the routes share: settings, the store's two ends, the stream, the analysis, counters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import sqlalchemy as sa
from fastapi import Request

from rankscope_server.access.door import Door
from rankscope_server.access.oidc import Issuer, issuer_of
from rankscope_server.access.quotas import Quota
from rankscope_server.access.tries import Tries
from rankscope_server.alerts.reading import Delays
from rankscope_server.alerts.service import Alerts
from rankscope_server.analysis.loop import AnalysisLoop
from rankscope_server.api.counters import Counters
from rankscope_server.api.neighbours import Parts, joined
from rankscope_server.api.stored import Announcer
from rankscope_server.batch_log.interface import Log
from rankscope_server.batch_log.opening import Following, Store, open_log
from rankscope_server.batch_log.partitions import LeasesOfRuns, Share
from rankscope_server.broker import Broker
from rankscope_server.ingest.intake import Intake
from rankscope_server.limits import Buckets
from rankscope_server.otlp.taking import Taking
from rankscope_server.preflight.dialling import Dialler
from rankscope_server.preflight.hub import Hub
from rankscope_server.preflight.targets import Policy
from rankscope_server.retention.loop import RetentionLoop
from rankscope_server.settings import Settings, is_loopback
from rankscope_server.store.blobs import Blobs
from rankscope_server.store.disk import Disk, disk_of
from rankscope_server.store.engine import only_server, open_engines
from rankscope_server.store.leases import ALERTS, PREFLIGHTS, RETENTION, Leases, LeasesOf
from rankscope_server.store.objects import open_blobs
from rankscope_server.store.shared_leases import SharedLeases, open_leases
from rankscope_server.store.writer import Writer


@dataclass(slots=True)
class Service:
    """One running server, without its HTTP side."""

    settings: Settings
    writer: Writer
    reader: sa.Engine
    broker: Broker
    analysis: AnalysisLoop
    preflights: Hub
    dialler: Dialler
    counters: Counters
    intake: Intake
    disk: Disk
    retention: RetentionLoop
    alerts: Alerts
    door: Door
    tries: Tries
    issuer: Issuer | None  # to sign in with
    log: Log  # the way of batches into the store
    followers: Following | None  # that store what is in it, where it is no direct one
    blobs: Blobs
    begun: Buckets = field(default_factory=Buckets)  # sign-ins with the issuer, by address
    event_quota: Quota = field(default_factory=lambda: Quota("events"))
    otlp: Taking = field(init=False)

    def __post_init__(self) -> None:
        self.otlp = Taking(self.reader, self.log)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Give a connection that sees one state of the store."""
        with self.reader.connect() as connection:
            yield connection

    def behind_seconds(self, run_id: str) -> float:
        """Return how old what is said of a run may be, whatever holds it up."""
        return max(self.analysis.behind_seconds, self.intake.delay_seconds(run_id))

    def silent_before_ns(self, run_id: str) -> int:
        """Return since when a rank must have sent something, or it is silent."""
        return time.time_ns() - int(self.silent_after_seconds(run_id) * 1e9)

    def silent_after_seconds(self, run_id: str) -> float:
        """Return for how long a rank may send nothing; what is on its way is no silence."""
        return self.settings.silent_after_seconds + self.intake.delay_seconds(run_id)


def names_of(settings: Settings) -> tuple[str, ...]:
    """Return the work of the whole store that a process of this role may do."""
    works = (ALERTS, RETENTION) if settings.works else ()
    return works + ((PREFLIGHTS,) if settings.holds_preflights else ())


def _divided(
    settings: Settings, leases: Leases, names: tuple[str, ...]
) -> tuple[Share | None, Leases, Leases]:
    """Return what this process has of the log, and its leases of the store and of runs."""
    if not isinstance(leases, SharedLeases) or not settings.nats_url:
        return None, leases, leases
    share = Share(leases, settings.log_partitions)
    return share, LeasesOf(leases, names), LeasesOfRuns(leases, share)


@contextmanager
def _opened(settings: Settings, url: str) -> Iterator[tuple[sa.Engine, sa.Engine, Blobs]]:
    """Give what writes to the store, what reads it, and where the data of chunks is."""
    with ExitStack() as stack:
        stack.enter_context(only_server(url))
        writing, reader = open_engines(url, settings.synchronous)
        stack.callback(reader.dispose)
        stack.callback(writing.dispose)
        blobs = stack.enter_context(
            open_blobs(settings.blobs, writing, reader, is_synced=settings.synchronous == "full")
        )
        yield writing, reader, blobs


@contextmanager
def open_service(settings: Settings) -> Iterator[Service]:
    """Open the store and start the threads; at the end stop them in order.

    Raises StoreInUseError, StoreVersionError, SQLAlchemyError, OSError.
    """
    url, issuer = settings.address_of_database(), issuer_of(settings)
    disk = disk_of(url, settings.disk_reserve_bytes, settings.disk_low_bytes)
    with ExitStack() as stack:
        disk.open()
        writing, reader, blobs = stack.enter_context(_opened(settings, url))
        writer = Writer(writing, settings.group_commit_batches, disk=disk)
        broker = Broker()
        intake = Intake()
        names = names_of(settings)
        leases = stack.enter_context(open_leases(url, writing, settings.role, names))
        share, of_store, of_runs = _divided(settings, leases, names)
        analysis = AnalysisLoop(settings, writer, reader, broker, of_runs, intake=intake)
        writer.start()
        stack.callback(writer.close)
        analysis.start()
        stack.callback(analysis.close)
        preflights = Hub(writer, reader, broker, of_store)
        policy = Policy(settings.networks(), is_loopback(settings.host))
        dialler = Dialler(policy, preflights.limits)
        retention = RetentionLoop(settings, writer, reader, broker, disk, of_store, blobs)
        retention.on_deleted = analysis.forget
        retention.start()
        stack.callback(retention.close)
        alerts = Alerts(
            settings, writer, reader,
            Delays(
                lambda: analysis.behind_seconds,
                intake.own_delay_seconds,
                lambda: max(writer.queue_ratio, leases.others.queue_ratio),
            ),
            of_store,
        )  # fmt: skip
        counters = Counters(analysis, broker, intake, writer, disk, retention, alerts)
        counters.count_servers(lambda: leases.num_servers)
        alerts.start()
        stack.callback(alerts.close)
        if isinstance(leases, SharedLeases):
            parts = Parts(writer, broker, analysis, retention, alerts)
            stack.enter_context(joined(url, leases, parts))
        announcer = Announcer(analysis, broker, counters)
        kept = Store(reader, writer, leases, share, intake)
        batches, followers = stack.enter_context(
            open_log(settings, kept, announcer.stored, counters.rejected.inc)
        )
        yield Service(
            settings, writer, reader, broker, analysis, preflights, dialler, counters, intake,
            disk, retention, alerts,
            Door(
                settings.token, reader, is_shut=settings.has_other_doors,
                mark=issuer.mark if issuer is not None else "",
            ),
            Tries(), issuer, batches, followers, blobs,
        )  # fmt: skip


def service_of(request: Request) -> Service:
    """Return the service of the app that got this request."""
    return cast(Service, request.app.state.service)
