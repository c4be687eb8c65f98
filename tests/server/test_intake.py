"""Batches under way and put off: counted, and never taken for silence; none is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import string
import threading
import time
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rankscope.wire import schema, zstd
from rankscope_server.ingest.intake import (
    COMES_AGAIN_SECONDS,
    MOST_WAITED_SECONDS,
    NEWEST_SECONDS,
    Intake,
)
from tests.server.conftest import ServerProcess, log_line


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_delay_is_that_of_the_oldest_whole_batch() -> None:
    clock = Clock()
    intake = Intake(clock)
    assert intake.delay_seconds() == 0.0
    with intake.under_way(10) as first:
        clock.now += 60.0  # its sender is slow: no delay of ours
        assert intake.delay_seconds() == 0.0
        intake.received(first)
        clock.now += 2.0
        with intake.under_way(10) as second:
            intake.received(second)
            clock.now += 1.0
            assert intake.delay_seconds() == 3.0
        assert intake.delay_seconds() == 3.0
    assert intake.delay_seconds() == 0.0


def test_what_is_put_off_counts_until_it_had_the_time_to_come_again() -> None:
    clock = Clock()
    intake = Intake(clock)
    for _ in range(3):
        intake.put_off()
        clock.now += 5.0
    assert intake.num_put_off == 3
    assert intake.delay_seconds() == 15.0  # since the first one
    clock.now += COMES_AGAIN_SECONDS
    assert intake.delay_seconds() == 0.0


def test_a_quota_is_no_delay_of_the_server() -> None:
    clock = Clock()
    intake = Intake(clock)
    for _ in range(3):
        intake.put_off(by_quota=True)
        clock.now += 5.0
    assert intake.delay_seconds() == 15.0
    assert intake.own_delay_seconds() == 0.0
    intake.put_off()
    clock.now += 5.0
    assert intake.own_delay_seconds() == 5.0


def test_what_waits_at_half_of_the_collectors_counts_while_they_send() -> None:
    clock = Clock()
    intake = Intake(clock)
    intake.waited("run", "a", 40.0)  # has a slow link
    intake.waited("run", "b", 0.5)
    intake.waited("run", "c", -3.0)
    assert intake.delay_seconds("run") == intake.own_delay_seconds() == 0.5
    intake.waited("run", "b", 20.0)
    assert intake.delay_seconds("run") == 20.0
    intake.waited("other", "d", 0.0)
    assert (intake.delay_seconds("other"), intake.delay_seconds()) == (0.0, 0.0)
    intake.waited("run", "b", 1e9)
    assert intake.delay_seconds("run") == 40.0
    clock.now += NEWEST_SECONDS
    intake.waited("run", "a", 1e9)
    assert intake.delay_seconds("run") == intake.own_delay_seconds() == MOST_WAITED_SECONDS
    assert intake.wait_seconds() == MOST_WAITED_SECONDS


@given(sizes=st.lists(st.integers(1, 200), max_size=40), keep=st.integers(0, 5))
def test_bytes_add_up_whatever_comes_and_goes(sizes: list[int], keep: int) -> None:
    intake, open_ones = Intake(), []
    for size in sizes:
        one = intake.under_way(size)
        one.__enter__()
        open_ones.append((one, size))
        while len(open_ones) > keep:
            open_ones.pop(0)[0].__exit__(None, None, None)
        assert intake.num_bytes == sum(size for _, size in open_ones)
    for one, _ in open_ones:
        one.__exit__(None, None, None)
    assert intake.num_bytes == 0


def body_of(producer: str, sequence: int) -> bytes:
    """Return a batch of 20 lines that do not compress."""
    text = "".join(random.Random(f"{producer} {sequence}").choices(string.printable[:90], k=40_000))
    lines = [log_line(text[at : at + 2_000]) for at in range(0, len(text), 2_000)]
    batch = schema.Batch(
        schema_version=schema.SCHEMA_VERSION, run_id="crowd", producer=producer, host="h",
        sequence=sequence, sent_ns=1, records=[msgspec.Raw(schema.encode(line)) for line in lines],
    )  # fmt: skip
    return zstd.pack(schema.encode(batch))


def test_a_crowd_is_put_off_and_everything_arrives(tmp_path: Path) -> None:
    """Room for about two batches, twelve senders at once: they wait as told, nothing is lost."""
    server = ServerProcess(
        tmp_path, "--max-bodies-bytes", "60000", "--max-batch-bytes", "60000"
    ).start()
    put_off: list[str] = []
    try:

        def send(name: str) -> None:
            for sequence in range(1, 6):
                while not sent(body_of(name, sequence)):
                    time.sleep(0.02)

        def sent(body: bytes) -> bool:
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
            with contextlib.closing(connection):
                try:
                    connection.request("POST", "/api/v1/ingest", body, {"Content-Encoding": "zstd"})
                    answer = connection.getresponse()
                    said = json.loads(answer.read())
                except (OSError, http.client.HTTPException):
                    return False  # what is refused before its body was read may be closed
            if answer.status == 429:
                put_off.append(str(answer.headers["Retry-After"]))
                return False
            assert (answer.status, said["refused"]) == (200, [])
            return True

        senders = [threading.Thread(target=send, args=(f"node-{n}",)) for n in range(12)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(120)
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("GET", "/api/v1/runs/crowd/logs?limit=1")
        found = json.loads(connection.getresponse().read())
        connection.close()
    finally:
        server.close()
    assert put_off
    assert all(int(pause) > 0 for pause in put_off)
    assert found["total"] == 12 * 5 * 20, found
