"""A database file that came to harm: the server says so, and fails at nothing."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rankscope.wire import schema
from rankscope_server.cli import EXIT_CANNOT_START, check, serve
from rankscope_server.settings import read as read_settings
from tests.server.conftest import Sender, ServerProcess, log_line

Start = Callable[..., ServerProcess]
PAGE_BYTES = 4_096


def file_of(server: ServerProcess) -> Path:
    """Return the database file of a server that has ended, all of it in this one file."""
    server.end(signal.SIGTERM)
    assert not (server.folder / "rankscope.db-wal").exists()
    return server.folder / "rankscope.db"


def test_a_damaged_file_is_said_in_one_line_at_the_start(
    start_server: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(start_server())
    data = bytearray(file.read_bytes())
    data[100:PAGE_BYTES] = b"\xff" * (PAGE_BYTES - 100)  # the schema
    file.write_bytes(data)
    flags = ["--data-dir", str(file.parent), "--port", "0"]
    assert serve(flags) == EXIT_CANNOT_START
    said = capsys.readouterr().err
    assert said.startswith("rankscope serve: the database file is damaged: sqlite:///")
    assert said.endswith("restore it from a copy, or choose another store with --data-dir\n")
    assert said.count("\n") == 1
    assert check(read_settings(["--check", *flags], {})) == EXIT_CANNOT_START
    assert "the database file is damaged" in capsys.readouterr().out


def test_a_damaged_table_is_a_503_and_no_failure(start_server: Start) -> None:
    server = start_server()
    with httpx.Client(base_url=server.url) as client:
        sender = Sender(client)  # type: ignore[arg-type]
        values = {"loss": 0.5}
        metric = schema.Metrics(attempt=0, rank=0, time_ns=1, step=1, values=values)
        sender.send(log_line("whole"), metric)
    file = file_of(server)
    with sqlite3.connect(file) as database:
        roots = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE tbl_name IN ('batch', 'metric')"
        )
        pages = [page for (page,) in roots]
    database.close()
    data = bytearray(file.read_bytes())
    for page in pages:
        data[(page - 1) * PAGE_BYTES : (page - 1) * PAGE_BYTES + 64] = b"\xff" * 64
    file.write_bytes(data)
    server = start_server("--look-seconds", "3600", "--retention-seconds", "3600")
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/api/v1/runs/run/logs").json()["total"] == 1
        read = client.get("/api/v1/runs/run/metrics")
        written = client.post("/api/v1/ingest", content=sender.body(log_line("more")))
    for reply in (read, written):
        assert reply.status_code == 503, reply.text
        assert reply.json()["error"]["what"] == "the database file is damaged"
        assert reply.json()["error"]["remedy"] == "restore it from a copy"
