"""Deletion in a real server: batches go on, also after a kill, and the disk gets its room back."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.server.conftest import ServerProcess
from tests.server.filling import Collector, Stream, fill

Start = Callable[..., ServerProcess]
SOON = ("--forget-after-seconds", "0.5", "--disk-low-bytes", "0", "--disk-reserve-bytes", "0")


def delete(server: ServerProcess, run_id: str) -> dict[str, Any]:
    """Delete a run once it is no longer live."""
    deadline = time.monotonic() + 20
    while True:
        reply = httpx.delete(
            f"{server.url}/api/v1/runs/{run_id}?confirm={run_id}", timeout=60, trust_env=False
        )
        if reply.status_code != 409:
            assert reply.status_code == 200, reply.text
            found: dict[str, Any] = reply.json()
            return found
        assert time.monotonic() < deadline, reply.text
        time.sleep(0.05)


def deletion(server: ServerProcess, run_id: str) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/api/v1/deletions/{run_id}", timeout=60, trust_env=False)
    found: dict[str, Any] = reply.json()
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_batches_are_acknowledged_while_a_run_is_deleted(
    start_server: Start, tmp_path: Path
) -> None:
    server = start_server(*SOON)
    fill(server.url, "big", batches=30)
    size = (tmp_path / "rankscope.db").stat().st_size
    assert size > 6 << 20
    stream = Stream(server.url, "live")
    stream.start()
    wait_until(lambda: len(stream.acknowledged) > 3)
    began = time.monotonic()
    row = delete(server, "big")
    assert row["finished_ms"] is None
    wait_until(lambda: deletion(server, "big")["finished_ms"] is not None)
    ended = time.monotonic()
    stream.end()
    meanwhile = [took for at, took in stream.acknowledged if began < at < ended]
    assert len(meanwhile) >= 10, (ended - began, len(meanwhile))
    assert stream.refused == []
    row = deletion(server, "big")
    assert row["bytes"] > 6 << 20
    assert row["rows"] == row["rows_at_start"] > 400
    # What was freed is the disk's again, and the log is no larger than its limit.
    wait_until(lambda: (tmp_path / "rankscope.db").stat().st_size < size / 3)
    assert (tmp_path / "rankscope.db-wal").stat().st_size <= 64 << 20
    server.end()
    assert intact(tmp_path)["live"] == len(stream.acknowledged)


def intact(folder: Path) -> dict[str, int]:
    """Return how many batches each run has in a sound database."""
    with sqlite3.connect(folder / "rankscope.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = database.execute("SELECT run_id, count(*) FROM batch GROUP BY run_id").fetchall()
    database.close()
    return dict(found)


def test_a_killed_server_goes_on_with_a_deletion(start_server: Start, tmp_path: Path) -> None:
    server = start_server(*SOON)
    fill(server.url, "big", batches=25)
    fill(server.url, "stays", batches=3)
    delete(server, "big")
    wait_until(lambda: deletion(server, "big")["rows"] > 20)
    server.end(signal.SIGKILL)
    before = intact(tmp_path)
    server = start_server(*SOON)
    wait_until(lambda: deletion(server, "big")["finished_ms"] is not None)
    runs = httpx.get(f"{server.url}/api/v1/runs", trust_env=False).json()["runs"]
    assert [run["run_id"] for run in runs] == ["stays"]
    wait_until(lambda: (tmp_path / "rankscope.db").stat().st_size < 4 << 20)
    server.end()
    assert intact(tmp_path) == {"stays": 3}
    assert before["stays"] == 3


def test_a_collector_reports_what_a_deleted_run_refuses(
    start_server: Start, tmp_path: Path
) -> None:
    server = start_server(*SOON)
    collector = Collector(server.url, tmp_path / "spool", "gone")
    collector.put()
    wait_until(lambda: collector.num_waiting == 0)
    delete(server, "gone")
    collector.put()  # it was cut off for a while
    wait_until(lambda: collector.num_waiting == 0)
    (why,) = collector.refused
    assert why.startswith("HTTP 410: run 'gone' was deleted (run_id: start a run with another id")
    wait_until(lambda: deletion(server, "gone")["finished_ms"] is not None)
    server.end()
    assert intact(tmp_path) == {}
