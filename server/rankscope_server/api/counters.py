"""The server's own counters and gauges, as Prometheus scrapes them from `/metrics`."""

from __future__ import annotations

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics

from rankscope_server.alerts.service import Alerts
from rankscope_server.analysis.loop import AnalysisLoop
from rankscope_server.broker import Broker

_PLAIN = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # a second series for each counter, always the start of the server


class Counters:
    """Totals since the start, and what is so now; safe to add to from any thread."""

    def __init__(self, analysis: AnalysisLoop, broker: Broker, alerts: Alerts) -> None:
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
        self._gauge(
            "analysis_behind_seconds", "For how long stored batches wait for a look."
        ).set_function(lambda: analysis.behind_seconds)
        self._gauge("streams_open", "Open event streams.").set_function(lambda: broker.subscribers)
        for state, text in (("pending", "that wait"), ("given_up", "that were given up")):
            self._gauge(f"alert_messages_{state}", f"Alert messages {text}.").set_function(
                partial(alerts.num_messages, state)
            )

    def _ingest(self, name: str, text: str) -> Counter:
        return Counter(f"rankscope_ingest_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"rankscope_{name}", text, registry=self._registry)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all of them and their media type: OpenMetrics where it is accepted, else text.

        The library's own choice raises for a version that is no number.
        """
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(self._registry), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), _PLAIN
