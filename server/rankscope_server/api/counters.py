"""The server's own counters and gauges, as Prometheus scrapes them from `/metrics`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from rankscope_server.alerts.service import Alerts
from rankscope_server.analysis.loop import AnalysisLoop
from rankscope_server.broker import Broker
from rankscope_server.ingest.intake import Intake
from rankscope_server.retention.loop import RetentionLoop
from rankscope_server.store.blobs import CAUSE as BLOBS
from rankscope_server.store.disk import Disk
from rankscope_server.store.writer import Writer

_PLAIN = "text/plain; version=0.0.4; charset=utf-8"

# why a request was not served: `StoreUnavailableError.cause`
CAUSES = ("disk_full", "behind", "stopping", "damaged", "database", "log", BLOBS)

disable_created_metrics()  # a second series for each counter, always the start of the server


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the server itself; `kind` where there are several of a name, None: unknown."""

    name: str
    kind: str
    text: str
    value: float | None


class Counters:
    """Totals since the start, and what is so now; safe to add to from any thread."""

    def __init__(
        self,
        analysis: AnalysisLoop,
        broker: Broker,
        intake: Intake,
        writer: Writer,
        disk: Disk,
        retention: RetentionLoop,
        alerts: Alerts,
    ) -> None:
        self._registry = CollectorRegistry()
        self.batches = self._ingest("batches", "Batches stored.")
        self.duplicates = self._ingest("batches_duplicate", "Batches that were stored before.")
        self.rejected = self._ingest("batches_rejected", "Requests that were no batch.")
        self.records = self._ingest("records", "Records stored.")
        self.chunks = self._ingest("chunks", "Chunks stored.")
        self.events = self._ingest("events", "Events in stored chunks.")
        self.refused = self._ingest("refused", "Records and chunks refused.")
        self.bytes = self._ingest("bytes", "Bytes of stored batches as they came.")
        self.seconds = self._ingest("seconds", "Time from request to durable answer, summed.")
        self._gauge("runs_live", "Runs that the analysis holds in memory.").set_function(
            lambda: analysis.num_runs
        )
        self._gauge(
            "runs_behind", "Those of them with stored batches that no look has seen yet."
        ).set_function(lambda: analysis.num_behind)
        self._gauge("streams_open", "Open event streams.").set_function(lambda: broker.subscribers)
        self.unavailable = Counter(
            "rankscope_unavailable", "Requests that the store could not serve, by cause.",
            ["cause"], registry=self._registry,
        )  # fmt: skip
        for cause in CAUSES:
            self.unavailable.labels(cause)
        self._of_work(analysis, intake, writer)
        self._of_disk(disk, retention)
        for state, text in (
            ("pending", "that wait"), ("given_up", "that were given up"),
            ("dropped", "that were not sent, as their channel was full, off or deleted"),
        ):  # fmt: skip
            self._gauge(f"alert_messages_{state}", f"Alert messages {text}.").set_function(
                partial(alerts.num_messages, state)
            )
        self._registry.register(_Sums(_sums(analysis, retention, intake)))

    def count_servers(self, number: Callable[[], int]) -> None:
        """Show how many server processes are up on this store."""
        self._gauge("servers_up", "Server processes on this store.").set_function(number)

    def _of_work(self, analysis: AnalysisLoop, intake: Intake, writer: Writer) -> None:
        self._values(
            {
                "queue_jobs": ("Transactions that wait.", lambda: writer.num_waiting),
                "queue_bytes": (
                    "Bytes of batches that are under way: here in part or whole, not durable yet.",
                    lambda: intake.num_bytes,
                ),
                "queue_delay_seconds": (
                    "For how long the oldest of them has been here, or is put off.",
                    intake.delay_seconds,
                ),
                "collector_wait_seconds": (
                    "How long batches had waited at half of the collectors or more.",
                    intake.wait_seconds,
                ),
                "analysis_lag_seconds": (
                    "How long ago the oldest stored batch came that no look has seen.",
                    lambda: analysis.lag_seconds,
                ),
                "shedding_level": (
                    "The highest level of thinning that this server asks a run for, 0 for none.",
                    lambda: analysis.shedding.highest,
                ),
            }
        )

    def _of_disk(self, disk: Disk, retention: RetentionLoop) -> None:
        self._values(
            {
                "disk_full": ("1 while no data is taken.", lambda: bool(disk.full())),
                "disk_free_bytes": (
                    "Free on the disk of the embedded store.",
                    lambda: _known(disk.space().free_bytes),
                ),
                "database_bytes": (
                    "Size of the database with its indexes.",
                    lambda: _known(retention.space.database_bytes()),
                ),
                "wal_bytes": ("Size of its write-ahead log.", lambda: disk.space().wal_bytes),
            }
        )

    def _values(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        for name, (text, value) in gauges.items():
            self._gauge(name, text).set_function(value)

    def _ingest(self, name: str, text: str) -> Counter:
        return Counter(f"rankscope_ingest_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"rankscope_{name}", text, registry=self._registry)

    def exposition(self, accept: str, others: Iterable[Metric] = ()) -> tuple[bytes, str]:
        """Return all of them and `others`, and their media type.

        OpenMetrics where it is accepted, else text: the library's own choice raises for a version
        that is no number.
        """
        shown = CollectorRegistry()
        shown.register(_Listed([*self._registry.collect(), *others]))
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(shown), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(shown), _PLAIN

    def figures(self) -> Iterator[Figure]:
        """Yield each number that the exposition has."""
        for family in self._registry.collect():
            for sample in family.samples:
                value = sample.value if math.isfinite(sample.value) else None
                kind = next(iter(sample.labels.values()), "")
                yield Figure(sample.name, kind, family.documentation, value)


_Source: TypeAlias = tuple[str, Callable[[], Mapping[str, float]]]  # help; values by kind


def _sums(analysis: AnalysisLoop, retention: RetentionLoop, intake: Intake) -> dict[str, _Source]:
    return {
        "ingest_batches_put_off": (
            "Batches refused for now, as too much was under way: they come again.",
            lambda: {"": intake.num_put_off},
        ),
        "looks": ("Looks of the analysis.", lambda: {"": analysis.num_looks}),
        "look_seconds": ("Time in looks, summed.", lambda: {"": analysis.look_seconds}),
        "retention_removed_rows": (
            "Rows that retention and deletions removed.", lambda: retention.removed_rows
        ),
        "retention_removed_bytes": ("Their bytes of content.", lambda: retention.removed_bytes),
    }  # fmt: skip


class _Sums(Collector):
    """Totals that others keep: read when Prometheus asks."""

    def __init__(self, sources: Mapping[str, _Source]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield each with its values now, by kind where there are several."""
        for name, (text, values) in self._sources.items():
            now = dict(values())
            labels = [] if "" in now else ["kind"]
            family = CounterMetricFamily(f"rankscope_{name}", text, labels=labels)
            for kind, value in now.items():
                family.add_metric([kind] if labels else [], value)
            yield family


class _Listed(Collector):
    """Metrics that were read already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield each."""
        yield from self._metrics


def _known(value: int | None) -> float:
    return float("nan") if value is None else float(value)
