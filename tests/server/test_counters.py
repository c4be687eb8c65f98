"""What Prometheus scrapes, read by its own parsers."""

from __future__ import annotations

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Sender, TestClient, log_line, scraped

COUNTERS = {
    f"rankscope_ingest_{name}_total"
    for name in (
        "batches", "batches_duplicate", "batches_rejected", "records", "chunks", "events",
        "refused", "bytes", "seconds", "batches_put_off",
    )
}  # fmt: skip
COUNTERS |= {f"rankscope_{name}_total" for name in ("looks", "look_seconds", "unavailable")}
GAUGES = {
    f"rankscope_{name}"
    for name in (
        "runs_live", "runs_behind", "servers_up", "streams_open", "queue_bytes", "queue_jobs",
        "queue_delay_seconds", "analysis_lag_seconds", "disk_full", "disk_free_bytes",
        "database_bytes", "wal_bytes", "alert_messages_pending", "alert_messages_given_up",
        "alert_messages_dropped", "shedding_level", "collector_wait_seconds",
        "run_series_up", "run_series_left_out",
    )
}  # fmt: skip
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


def test_names_and_types_are_those_of_the_documents(client: TestClient) -> None:
    reply = client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(reply.text))
    assert names_of(families) == {"counter": COUNTERS, "gauge": GAUGES}
    assert all(family.documentation.endswith(".") for family in families)


def names_of(families: list[Metric]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for family in families:
        names.setdefault(family.type, set()).update(sample.name for sample in family.samples)
    return names


def test_it_counts_what_came(client: TestClient) -> None:
    sender = Sender(client)
    sender.send(log_line("x"), {"kind": "odd"})
    sender.sequence = 0
    assert sender.send(log_line("x"))["duplicate"]
    assert client.post("/api/v1/ingest", content=b"?").status_code == 400
    values = scraped(client)
    wanted = {"batches": 1, "batches_duplicate": 1, "batches_rejected": 1, "records": 1}
    for name, value in {**wanted, "refused": 1}.items():
        assert values[f"rankscope_ingest_{name}_total"] == value, name
    assert 0 < values["rankscope_ingest_seconds_total"] < 60
    assert values["rankscope_runs_live"] == 1


def test_it_shows_the_lag_of_the_analysis_and_its_looks(client: TestClient) -> None:
    Sender(client).send(log_line("x"))
    before = scraped(client)
    assert before["rankscope_analysis_lag_seconds"] > 0
    assert before["rankscope_queue_bytes"] == 0
    assert before["rankscope_queue_jobs"] >= 0
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    after = scraped(client)
    assert after["rankscope_analysis_lag_seconds"] == 0
    assert after["rankscope_looks_total"] == before["rankscope_looks_total"] + 1
    assert after["rankscope_look_seconds_total"] > before["rankscope_look_seconds_total"]
    assert after["rankscope_disk_full"] == 0
    # of another server's disk nothing is known
    is_embedded = not client.app.state.service.settings.database_url  # type: ignore[attr-defined]
    assert (after["rankscope_disk_free_bytes"] > 0) == is_embedded
    assert after["rankscope_database_bytes"] > 0


def test_requests_that_the_store_cannot_serve_are_counted_by_cause(client: TestClient) -> None:
    writer = client.app.state.service.writer  # type: ignore[attr-defined]
    writer._closed = True
    reply = client.post("/api/v1/ingest", content=Sender(client).body(log_line("x")))
    writer._closed = False
    assert reply.status_code == 503
    lines = client.get("/metrics").text.splitlines()
    assert 'rankscope_unavailable_total{cause="stopping"} 1.0' in lines
    assert 'rankscope_unavailable_total{cause="disk_full"} 0.0' in lines


def test_large_counters_are_exact(client: TestClient) -> None:
    counters = client.app.state.service.counters  # type: ignore[attr-defined]
    counters.bytes.inc(123_456_789_012_345)
    counters.seconds.inc(1_234_567.25)
    values = scraped(client)
    assert values["rankscope_ingest_bytes_total"] == 123_456_789_012_345
    assert values["rankscope_ingest_seconds_total"] == 1_234_567.25


@pytest.mark.parametrize(
    "accept",
    [PROMETHEUS_ACCEPT, "application/openmetrics-text", "application/openmetrics-text; version=x"],
)
def test_openmetrics_is_sent_to_those_that_take_it(client: TestClient, accept: str) -> None:
    reply = client.get("/metrics", headers={"Accept": accept})
    assert reply.headers["content-type"] == exposition.CONTENT_TYPE_LATEST
    families = list(parser.text_string_to_metric_families(reply.text))
    assert names_of(families) == {"counter": COUNTERS, "gauge": GAUGES}


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain; version=x", "text/html"])
def test_all_others_get_text(client: TestClient, accept: str) -> None:
    reply = client.get("/metrics", headers={"Accept": accept})
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert names_of(list(text_string_to_metric_families(reply.text))).keys() == {"counter", "gauge"}
