"""Joins this process to the others on the same store: what each hears and says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rankscope_server.alerts.service import Alerts
from rankscope_server.analysis.loop import AnalysisLoop
from rankscope_server.broker import Broker
from rankscope_server.retention.loop import RetentionLoop
from rankscope_server.store.engine import open_for_notices
from rankscope_server.store.leases import ALERTS, RETENTION, Vitals
from rankscope_server.store.notices import Notice, Notices
from rankscope_server.store.shared_leases import SharedLeases
from rankscope_server.store.writer import Writer

_RUN = "run:"  # begins the topic of a run
_WORK = "work:"  # begins the topics of what waits for the owner of a lease; no stream has them


@dataclass(frozen=True, slots=True)
class Parts:
    """What hears of other processes, and says how it is."""

    writer: Writer
    broker: Broker
    analysis: AnalysisLoop
    retention: RetentionLoop
    alerts: Alerts

    def hear(self, notice: Notice) -> None:
        """Take what another process says."""
        if notice.topic == _WORK + RETENTION:
            self.retention.wake(notice.changed)
        elif notice.topic == _WORK + ALERTS:
            self.alerts.deliverer.wake()
        else:
            self.broker.relayed(notice.topic, notice.changed, notice.step)
            if notice.topic.startswith(_RUN):
                self.analysis.heard(notice.topic.removeprefix(_RUN))

    def vitals(self) -> Vitals:
        """Return how this process is, and how its work goes."""
        says = {
            RETENTION: dataclasses.asdict(self.retention.progress),
            ALERTS: self.alerts.progress,
        }
        return Vitals(self.analysis.own_behind_seconds, self.writer.queue_ratio, says)


@contextmanager
def joined(url: str, leases: SharedLeases, parts: Parts) -> Iterator[None]:
    """Say and hear what there is, until the process ends."""
    notices = Notices(open_for_notices(url), leases.owner, parts.hear, parts.broker.missed)
    parts.broker.relay = notices.say
    parts.retention.pass_on = lambda asked: notices.say(_WORK + RETENTION, tuple(asked))
    parts.alerts.pass_on = lambda: notices.say(_WORK + ALERTS)
    leases.vitals = parts.vitals
    notices.start()
    try:
        yield
    finally:
        notices.close()
