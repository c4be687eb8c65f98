"""Opens the way of batches into the store that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import sqlalchemy as sa

from rankscope_server.batch_log.answering import Answering
from rankscope_server.batch_log.direct import DirectLog
from rankscope_server.batch_log.interface import Log
from rankscope_server.batch_log.no_log import NoLog
from rankscope_server.batch_log.partitions import Share
from rankscope_server.batch_log.storing import OnStored
from rankscope_server.batch_log.validating import Validator
from rankscope_server.ingest.intake import Intake
from rankscope_server.settings import Settings
from rankscope_server.store.leases import Leases
from rankscope_server.store.shared_leases import SharedLeases
from rankscope_server.store.writer import Writer


class Following(Protocol):
    """What stores the entries of a log."""

    @property
    def is_alive(self) -> bool:
        """Return whether all of its threads work."""


@dataclass(frozen=True, slots=True)
class Store:
    """The store as a log uses it; `share` where there are workers."""

    reader: sa.Engine
    writer: Writer
    leases: Leases
    share: Share | None
    intake: Intake


@contextmanager
def open_log(
    settings: Settings, store: Store, on_stored: OnStored, on_rejected: Callable[[], None]
) -> Iterator[tuple[Log, Following | None]]:
    """Give the log, and what this process follows of it, with their threads."""
    with ExitStack() as stack:
        validator = Validator(settings.max_unpacked_bytes, lambda: store.intake.num_batches)
        validator.start()
        stack.callback(validator.close)
        if store.share is None or not isinstance(store.leases, SharedLeases):
            yield DirectLog(validator, store.writer, on_stored), None
            return
        # its client is an extra
        from rankscope_server.batch_log.followers import Followers, Parts
        from rankscope_server.batch_log.jetstream import JetStream, JetStreamLog
        from rankscope_server.batch_log.nats_client import NatsClient

        client = NatsClient(settings)
        client.start()
        stack.callback(client.close)
        streams = JetStream(settings, client)
        streams.start()
        followers = None
        if settings.works:
            followers = Followers(
                Parts(
                    streams, store.leases, store.share, store.reader, store.writer, validator,
                    store.intake, on_stored, on_rejected,
                )
            )  # fmt: skip
            followers.start()
            stack.callback(followers.close)
        if settings.takes_batches:
            yield JetStreamLog(settings, streams, Answering(store.reader, store.writer)), followers
        else:
            yield NoLog(settings.role), followers
