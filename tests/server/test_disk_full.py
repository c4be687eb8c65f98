"""A real server on a small file system that fills up; the collector's own upload sends."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import ServerProcess, wait_until
from tests.server.filling import Collector, batch, chunk, fill

MIB = 1 << 20
pytestmark = pytest.mark.needs("mount")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def start(disk: Path) -> Iterator[Callable[..., ServerProcess]]:
    running: list[ServerProcess] = []

    def begin(*flags: str) -> ServerProcess:
        running.append(ServerProcess(disk, *flags, "--forget-after-seconds", "0.5"))
        return running[-1].start()

    yield begin
    for server in running:
        server.close()


def get(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=30, trust_env=False)


def is_ready(server: ServerProcess) -> bool:
    return get(server, "/api/v1/ready").status_code == 200


def take_all(path: Path) -> None:
    """Fill the file system to its last byte, as another program would."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


@pytest.mark.parametrize("low_bytes", [0, 2 * MIB], ids=["to-the-last-byte", "with-a-margin"])
def test_nothing_acknowledged_is_lost_on_a_full_disk(
    start: Callable[..., ServerProcess], disk: Path, tmp_path: Path, low_bytes: int
) -> None:
    reserve = disk / "rankscope.reserve"
    server = start("--disk-low-bytes", str(low_bytes), "--disk-reserve-bytes", str(4 * MIB))
    assert reserve.stat().st_size == 4 * MIB
    fill(server.url, "old", batches=24, chunks=4)
    collector = Collector(server.url, tmp_path / "spool")
    collector.put()
    wait_until(lambda: collector.num_waiting == 0)
    assert is_ready(server)

    take_all(disk / "foreign")
    put_until_full(server, collector)
    refuses(server)
    collector.put()  # the one before may have come while there was room a moment ago
    wait_until(lambda: collector.uploader._failures)
    assert collector.num_waiting > 0
    reads_go_on(server)

    # A run can be deleted on a disk without a free byte, and that is what ends it.
    deleted = httpx.delete(f"{server.url}/api/v1/runs/old?confirm=old", timeout=60)
    assert deleted.status_code == 200, deleted.text
    wait_until(lambda: is_ready(server))
    wait_until(lambda: reserve.exists() and reserve.stat().st_size == 4 * MIB)
    wait_until(lambda: collector.num_waiting == 0)
    assert get(server, "/api/v1/deletions/old").json()["finished_ms"]

    # Full again, and somebody else frees space.
    (disk / "foreign").unlink()
    take_all(disk / "foreign")
    put_until_full(server, collector)
    (disk / "foreign").unlink()
    wait_until(lambda: collector.num_waiting == 0)
    assert is_ready(server)
    assert collector.refused == []
    server.end()
    assert stored(disk) == {number + 1: 3_000 for number in range(collector.number)}


def put_until_full(server: ServerProcess, collector: Collector) -> None:
    """Put batches until the server takes no more: the log of SQLite has some room in its file."""
    for _ in range(200):
        collector.put()
        time.sleep(0.2)  # until it is stored or refused
        if not is_ready(server):
            return
    raise AssertionError("the disk does not fill up")


def refuses(server: ServerProcess) -> None:
    """Check what a person and a sender are told."""
    reply = get(server, "/api/v1/ready")
    assert reply.status_code == 503
    assert "disk: the disk of the server is full" in reply.json()["error"]["what"]
    body = batch("live", 1000, chunk(1))
    refused = httpx.post(f"{server.url}/api/v1/ingest", content=body, timeout=30)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "disk of the server is full" in refused.json()["error"]["what"]
    assert refused.json()["error"]["remedy"]


def reads_go_on(server: ServerProcess) -> None:
    for path in ("/runs", "/runs/old", "/runs/live/map", "/storage", "/retention", "/health"):
        assert get(server, f"/api/v1{path}").status_code == 200, path
    metrics = get(server, "/metrics").text
    assert "rankscope_disk_full 1.0" in metrics
    assert 'rankscope_unavailable_total{cause="disk_full"}' in metrics


def stored(folder: Path) -> dict[int, int]:
    """Return how many steps each batch of the run has, in a sound database."""
    with sqlite3.connect(folder / "rankscope.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = database.execute(
            "SELECT sequence, sum(count) FROM batch JOIN chunk ON batch_id = batch.id "
            "WHERE batch.run_id = 'live' GROUP BY sequence"
        ).fetchall()
    database.close()
    return dict(rows)


def test_retention_frees_a_full_disk_by_itself(
    start: Callable[..., ServerProcess], disk: Path
) -> None:
    flags = ("--disk-low-bytes", str(2 * MIB), "--disk-reserve-bytes", str(4 * MIB))
    server = start(*flags)
    fill(server.url, "old", batches=8, chunks=4)
    server.end()
    take_all(disk / "foreign")
    server = start(*flags, "--keep-runs-bytes", "1")  # starts on a full disk, and frees it
    wait_until(lambda: is_ready(server))
    assert get(server, "/api/v1/runs").json()["total"] == 0
    assert (disk / "rankscope.reserve").stat().st_size == 4 * MIB
