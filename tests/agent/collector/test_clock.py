from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.node.upload.clock import CLOCK_PATH, EVERY_SECONDS, ClockExchange, Offset
from rankscope.node.upload.server import Server
from rankscope.wire import schema
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.processes import ensure, wait_for
from tests.agent.collector.real_server import RealServer
from tests.agent.collector.receiver import Receiver

MS = 1_000_000


class World:
    """A host and a server whose clocks differ, and a way there that is not the way back."""

    def __init__(self, offset_ns: int, there_ns: int, back_ns: int, seed: int = 0) -> None:
        self.offset_ns, self.there_ns, self.back_ns = offset_ns, there_ns, back_ns
        self.now_ns = 10**18
        self.set_by_ns = 0  # the host's clock is set in the middle of an exchange
        self.records: list[schema.Record] = []
        self.answer: tuple[int, str] | None = None
        self.num_asked = 0
        self._chance = random.Random(seed)
        self.exchange = ClockExchange(
            self.records.append, lambda: self.now_ns + self.set_by_ns, lambda: self.now_ns
        )

    def ask(self) -> tuple[int, str]:
        self.num_asked += 1
        self.now_ns += int(self.there_ns * self._chance.uniform(1, 3))
        received = self.now_ns + self.offset_ns
        self.now_ns += self._chance.randrange(MS)
        sent = self.now_ns + self.offset_ns
        self.now_ns += int(self.back_ns * self._chance.uniform(1, 3))
        return self.answer or (200, json.dumps({"received_ns": received, "sent_ns": sent}))

    def turn(self) -> None:
        self.exchange.turn(self.ask)


@given(
    st.integers(-(10**12), 10**12), st.integers(1, 300 * MS), st.integers(1, 300 * MS),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_the_true_offset_lies_in_the_band_whatever_the_ways_take(
    offset_ns: int, there_ns: int, back_ns: int, seed: int
) -> None:
    world = World(offset_ns, there_ns, back_ns, seed)
    found, why = world.exchange.measure(world.ask)
    assert found is not None, why
    assert abs(found.offset_ns - world.offset_ns) <= found.band_ns
    assert found.band_ns <= (world.there_ns + world.back_ns) * 3 // 2 + 1


def test_a_symmetric_way_is_right_to_much_less_than_the_band() -> None:
    world = World(251_300_000, 2 * MS, 2 * MS)
    found, _ = world.exchange.measure(world.ask)
    assert found is not None
    assert abs(found.offset_ns - 251_300_000) < found.band_ns / 2


def test_once_a_minute() -> None:
    world = World(5 * MS, MS, MS)
    world.turn()
    asked = world.num_asked
    world.turn()
    assert (len(world.records), world.num_asked) == (1, asked)
    world.now_ns += int(EVERY_SECONDS * 1e9)
    world.turn()
    assert len(world.records) == 2
    assert all(isinstance(record, schema.ClockOffset) for record in world.records)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, ""), "the server answers 404"),
        ((0, "ConnectionRefusedError: gone"), "ConnectionRefusedError: gone"),
        ((200, "<html>"), "the server's answer has no times"),
        ((200, '{"received_ns": 1}'), "the server's answer has no times"),
        ((200, '{"received_ns": 5, "sent_ns": 4}'), "the server's clock was set"),
        ((200, '{"received_ns": 1, "sent_ns": 900000000000}'), "the server's clock was set"),
    ],
)
def test_what_cannot_be_told_is_said_once_with_its_reason(
    answer: tuple[int, str], reason: str
) -> None:
    world = World(0, MS, MS)
    world.answer = answer
    for _ in range(3):
        world.turn()
        world.now_ns += int(EVERY_SECONDS * 1e9)
    (event,) = world.records
    assert isinstance(event, schema.Event)
    assert event.name == "clock offset unknown"
    assert event.fields["reason"].startswith(reason)
    world.answer = None
    world.turn()
    assert isinstance(world.records[-1], schema.ClockOffset)


def test_a_clock_that_is_set_in_the_middle_gives_no_offset() -> None:
    world = World(0, MS, MS)
    real = world.ask

    def ask() -> tuple[int, str]:
        world.set_by_ns += 3600 * 10**9
        return real()

    found, why = world.exchange.measure(ask)
    assert found is None
    assert why == "this host's clock was set while it was compared"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    real = RealServer(tmp_path / "server")
    real.start()
    yield real
    real.kill()


@pytest.mark.parametrize("false_ms", [37.0, -12.5, 251.3])
def test_a_false_clock_is_found_over_http(server: RealServer, false_ms: float) -> None:
    false_ns = int(false_ms * MS)
    exchange = ClockExchange(lambda record: None, lambda: time.time_ns() - false_ns)
    connection = Server(server.url, "")

    def ask() -> tuple[int, str]:
        answer = connection.send(CLOCK_PATH, b"", {})
        return answer.status, answer.text

    found, why = exchange.measure(ask)
    connection.close()
    assert isinstance(found, Offset), why
    assert abs(found.offset_ns - false_ns) <= found.band_ns
    assert found.band_ns < 100 * MS  # loopback, on a loaded machine


def test_a_kept_connection_is_answered_at_once(server: RealServer) -> None:
    connection = Server(server.url, "")
    begun = time.monotonic()
    for _ in range(100):
        assert connection.send(CLOCK_PATH, b"", {}).status == 200
    connection.close()
    assert time.monotonic() - begun < 3.5  # 4.4 s with delayed acknowledgements, 0.1 without


def test_the_collector_measures_and_the_server_keeps_it(run: Path, server: RealServer) -> None:
    FakeRank(run, 0)
    assert ensure(run, server=server.url)
    sql = "SELECT host, offset_ns, band_ns FROM clock_offset WHERE run_id = 'test-run'"
    wait_for(lambda: server.query(sql))
    ((host, offset_ns, band_ns),) = server.query(sql)
    assert host
    assert abs(offset_ns) <= band_ns  # both have the same clock


def test_a_server_that_cannot_tell_is_an_event(run: Path, receiver: Receiver) -> None:
    fake = FakeRank(run, 0)
    receiver.clock = False
    fake.say("hello")
    assert ensure(run, server=receiver.url)
    wait_for(lambda: [e for e in receiver.records(schema.Event) if e.name.startswith("clock")])
    wait_for(lambda: receiver.records(schema.LogLine))
