"""Connections that say nothing, bodies that drip, and more bytes than the memory should hold."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest

from rankscope.wire import zstd
from tests.server.conftest import Sender, ServerProcess, log_line

Start = Callable[..., ServerProcess]
MIB = 1 << 20
MOST_ABOVE_IDLE = 512 * MIB
HEAD = b"POST /api/v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def connect(server: ServerProcess) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


@contextlib.contextmanager
def memory_of(server: ServerProcess) -> Iterator[list[int]]:
    """Give a list that holds, at the end, the most bytes above those at the beginning."""
    assert server.process is not None
    process, most, done = psutil.Process(server.process.pid), [0], threading.Event()
    idle = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], process.memory_info().rss - idle)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def closed_within(connection: socket.socket, seconds: float) -> bytes:
    """Return what came before the server closed a connection."""
    connection.settimeout(seconds)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            got += part
    return got


def test_connections_without_a_request_are_closed(start_server: Start) -> None:
    server = start_server("--body-seconds", "1")
    silent, half, dripping = connect(server), connect(server), connect(server)
    half.sendall(HEAD)
    dripping.sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += dripping.recv(65_536)
    stop = threading.Event()

    def drip() -> None:  # a byte now and then of the next head
        with contextlib.suppress(OSError):
            for byte in HEAD:
                dripping.sendall(bytes([byte]))
                if stop.wait(0.2):
                    break

    dripper = threading.Thread(target=drip)
    dripper.start()
    for connection in (silent, half, dripping):
        assert closed_within(connection, 20) == b""
        connection.close()
    stop.set()
    dripper.join()


@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_a_body_that_stops_is_answered_and_closed(start_server: Start, framing: str) -> None:
    server = start_server("--body-seconds", "1")
    with connect(server) as connection:
        start = b"5\r\nhello\r\n" if "chunked" in framing else b"hello"
        connection.sendall(HEAD + framing.encode() + b"\r\n\r\n" + start)
        got = closed_within(connection, 20)
    assert b" 408 " in got.partition(b"\r\n")[0]
    assert b"too slowly" in got


def test_a_body_that_drips_is_closed_though_it_never_stops(start_server: Start) -> None:
    server = start_server("--body-seconds", "1")
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 30:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - started < 30


def test_a_thousand_slow_connections_leave_the_server_as_it_was(start_server: Start) -> None:
    server = start_server("--body-seconds", "5")
    with memory_of(server) as above, contextlib.ExitStack() as opened:
        slow = [opened.enter_context(connect(server)) for _ in range(1_000)]
        for n, connection in enumerate(slow):
            if n % 2:
                connection.sendall(HEAD + b"Content-Length: 9999999\r\n\r\n" + b"x" * 100)
            else:
                connection.sendall(HEAD)
        replies = [
            httpx.get(f"{server.url}/api/v1/runs", trust_env=False).status_code for _ in range(20)
        ]
        ends = {status_of(closed_within(connection, 30)) for connection in slow}
    assert replies == [200] * 20
    assert ends <= {0, 408, 429}
    assert above[0] < MOST_ABOVE_IDLE


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def post(server: ServerProcess, body: bytes, encoding: str) -> tuple[int, str]:
    headers = {"Content-Encoding": encoding} if encoding else {}
    with httpx.Client(trust_env=False, timeout=120) as client:
        reply = client.post(f"{server.url}/api/v1/ingest", content=body, headers=headers)
        return reply.status_code, reply.headers.get("retry-after", "")


def big_bodies() -> dict[str, tuple[bytes, str]]:
    """Return bodies of about 15 MiB, by what they are, with their encoding."""
    sender = Sender(None)  # type: ignore[arg-type]
    text = os.urandom(15 * MIB // 2 // 240).hex()
    lines = [log_line(text[: 60_000 // 2]) for _ in range(500)]
    return {
        "batch": (sender.body(*lines), ""),
        "noise": (os.urandom(15 * MIB), ""),
        "packed": (zstd.pack(msgspec.msgpack.encode(os.urandom(15 * MIB))), "zstd"),
        "bomb": (zstd.pack(bytes(63 * MIB)), "zstd"),
    }


@pytest.mark.parametrize("kind", ["batch", "noise", "packed", "bomb"])
def test_forty_large_bodies_at_once(start_server: Start, kind: str) -> None:
    server = start_server()
    body, encoding = big_bodies()[kind]
    answers: list[tuple[int, str]] = []
    with memory_of(server) as above:
        senders = [
            threading.Thread(target=lambda: answers.append(post(server, body, encoding)))
            for _ in range(40)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    assert len(answers) == 40
    assert {status for status, _ in answers} <= {200, 400, 415, 422, 413, 429}
    assert all(wait for status, wait in answers if status == 429)
    assert above[0] < MOST_ABOVE_IDLE
    assert post(server, Sender(None).body(log_line("after")), "")[0] == 200  # type: ignore[arg-type]


def test_a_batch_is_taken_once_there_is_room(start_server: Start, tmp_path: Path) -> None:
    """The collector waits as long as the server says, and loses nothing."""
    server = start_server("--max-bodies-bytes", "1024", "--max-batch-bytes", str(1 * MIB))
    big = Sender(None).body(log_line("x" * 60_000))  # type: ignore[arg-type]
    with connect(server) as hog:
        hog.sendall(HEAD + f"Content-Length: {MIB}\r\n\r\n".encode() + b"x")
        refused = post(server, big, "")
        assert refused == (429, "1")
    deadline = time.monotonic() + 20
    while post(server, big, "")[0] != 200:
        assert time.monotonic() < deadline
