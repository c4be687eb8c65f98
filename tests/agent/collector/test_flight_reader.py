"""A rank's ring, a server that answers as NCCL's would, and the collector's reading of both."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.files import flight_recorder as flight
from rankscope.files.run_directory import FLIGHT_SETUP
from rankscope.node.flight import ask, reader
from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.ranks import rings
from rankscope.node.ranks.rank import FollowedRank
from rankscope.wire import schema
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.flight_dumps import LATE_NS, Recorder
from tests.agent.collector.flight_server import Answer, FlightServer, drips, floods, hangs, says

NCCL = flight.FlightSetup(
    handlers=[flight.OF_NCCL], polled=[flight.OF_NCCL], is_timed=True, endless=["0"]
)
NAMES = ("sequence", "state", "ended_by", "flags", "duration_ns", "device_duration_ns")
AS_THEY_ARE = (schema.RETURNED, "", schema.FLAG_ASYNC, -1, -1)
MERGED = (
    schema.ENDED, "flight recorder", schema.FLAG_ASYNC | schema.FLAG_END_IS_UPPER_BOUND,
)  # fmt: skip


class Watched:
    """A followed rank, its Flight Recorder and what was read of both."""

    def __init__(self, run: Path) -> None:
        self.fake = FakeRank(run, 0)
        self.flight = Recorder(self.fake)
        self.flight.now = time.monotonic_ns()
        key = str(self.fake.directory.relative_to(run))
        self.ledger = Ledger()
        self.rank = FollowedRank(run, key, RankOffsets(), self.ledger, "h", lambda *_: None)
        self.rows: list[tuple[Any, ...]] = []
        self.records: list[Any] = []
        self.server: FlightServer | None = None
        self.longest = 0.0

    def serve(self, answer: Answer | None = None, setup: flight.FlightSetup = NCCL) -> FlightServer:
        dump = says(lambda: json.dumps(self.flight.dump()).encode())
        self.server = FlightServer(self.fake.directory, answer or dump, setup)
        return self.server

    def turn(self, *, gone: bool = False) -> None:
        began = time.monotonic()
        self.rank.collect(lambda raw: self.records.append(schema.decode_record(raw)), gone=gone)
        self.longest = max(self.longest, time.monotonic() - began)
        for events in self.rank.take():
            columns = events.columns
            self.rows += zip(*(list(columns[name]) for name in NAMES), strict=True)

    def until(self, what: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (self.rows, self.records)
            self.turn()
            time.sleep(0.01)

    def events(self, name: str) -> list[dict[str, str]]:
        return [record.fields for record in self.records if record.name == name]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(reader, "EVERY_SECONDS", 0.05)
    one = Watched(tmp_path)
    yield one
    if one.server is not None:
        one.server.close()


def test_ends_and_device_times_reach_the_chunk(watched: Watched) -> None:
    for _ in range(20):
        watched.flight.call()
    watched.fake.end(3)  # a better source told this one
    watched.flight.complete(watched.flight.entries)
    may_answer = threading.Event()
    dump = json.dumps(watched.flight.dump()).encode()
    server = watched.serve(says(lambda: dump if may_answer.wait(20) else b""))
    watched.until(lambda: watched.rows)
    ((sequence, state, ended_by, _, _, device),) = watched.rows  # it does not wait for the answer
    assert (sequence, state, ended_by, device) == (4, schema.ENDED, "", -1)
    may_answer.set()
    watched.until(lambda: len(watched.rows) == 20)
    assert sorted(row[0] for row in watched.rows) == list(range(1, 21))
    for _, state, ended_by, flags, duration, device in watched.rows[1:]:
        assert (state, ended_by, flags) == MERGED
        assert LATE_NS <= duration < LATE_NS + 1_000_000
        assert device == 2_500_000
    assert watched.rank.flight.ends.device_ns(np.array([3])).tolist() == [2_500_000]
    assert set(server.asked) == {f"/handler/{flight.OF_NCCL}"}
    assert not watched.ledger.take_records()


def test_what_is_in_flight_stays_open_and_the_rest_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "HELD_NS", 300_000_000)
    for _ in range(10):
        watched.flight.call()
    watched.flight.complete(watched.flight.entries[:7])
    watched.serve()
    watched.until(lambda: len(watched.rows) == 7)
    watched.until(lambda: time.monotonic_ns() - watched.flight.now > 900_000_000)
    assert len(watched.rows) == 7  # old enough to be let go, but known to run
    state = watched.rank.state(None, alive=True)
    assert state is not None
    assert [(group.issued, group.ended) for group in state.groups] == [(10, 7)]
    watched.flight.complete(watched.flight.entries[7:])
    watched.until(lambda: len(watched.rows) == 10)
    assert {row[1:4] for row in watched.rows} == {MERGED}


def test_slots_wait_for_an_answer_for_a_while_only(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "HELD_NS", 1_500_000_000)
    watched.flight.call()
    watched.serve(says(lambda: b'{"entries": []}'))
    entered = watched.flight.now
    watched.until(lambda: watched.rows)
    assert time.monotonic_ns() - entered >= 1_500_000_000
    assert [row[1:] for row in watched.rows] == [AS_THEY_ARE]
    watched.flight.complete(watched.flight.entries)
    watched.server.answer = says(lambda: json.dumps(watched.flight.dump()).encode())  # too late
    asked = len(watched.server.asked)
    watched.until(lambda: len(watched.server.asked) > asked + 2)
    assert len(watched.rows) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says(lambda: b"pong"), "no dump"),
        (says(lambda: b"no such handler", status=404), "404"),
        (says(lambda: b'{"entries": []}' + b" " * 9000, cut=5000), "cut"),
        (hangs, ""),
        (drips, ""),
        (floods, "more than 1 MiB"),
    ],
    ids=["garbage", "missing", "cut", "hangs", "drips", "floods"],
)
def test_bad_answers_cost_nothing_but_themselves(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, answer: Answer, reason: str
) -> None:
    monkeypatch.setattr(ask, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(ask, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(rings, "HELD_NS", 200_000_000)
    for _ in range(300):  # a backend that tells no end is let go after 2 s without answers
        watched.flight.call()
    server = watched.serve(answer)
    watched.until(lambda: watched.events("flight recorder silent"))
    (event,) = watched.events("flight recorder silent")
    assert reason in event["reason"]
    watched.until(lambda: len(watched.rows) == 300)
    assert {row[1:] for row in watched.rows} == {AS_THEY_ARE}
    assert watched.longest < 1.0  # no turn waits for an answer
    server.answer = says(lambda: json.dumps(watched.flight.dump()).encode())
    watched.until(lambda: _goes_on(watched) in {row[1:4] for row in watched.rows[300:]})
    assert len(watched.events("flight recorder silent")) == 1


def _goes_on(watched: Watched) -> tuple[Any, ...]:
    """Make one more call, which is done at once; return what its row should show."""
    watched.flight.now = time.monotonic_ns()
    watched.flight.complete([watched.flight.call()])
    return MERGED


def test_it_asks_less_and_less_where_nobody_answers(watched: Watched) -> None:
    server = watched.serve(says(lambda: b"?"))
    watched.until(lambda: len(server.asked) == 6)  # after 0, 0.05, 0.1, 0.2, 0.4, 0.8 s ...
    began = time.monotonic()
    watched.until(lambda: time.monotonic() - began > 1.0)
    assert len(server.asked) <= 7


def test_an_incident_leaves_a_file_and_a_summary(watched: Watched) -> None:
    setup = flight.FlightSetup(handlers=[flight.OF_NCCL])  # not safe to poll
    for _ in range(3):
        watched.flight.call()
    watched.flight.complete(watched.flight.entries[:1])
    server = watched.serve(setup=setup)
    watched.until(lambda: watched.rank.has_header)
    for _ in range(20):
        watched.turn()
    assert not server.asked
    for number in range(1, 6):
        watched.rank.flight.incident("inside a collective for 30 s")
        watched.until(lambda count=number: len(watched.events("flight recorder")) == count)
    event = watched.events("flight recorder")[0]
    assert event["reason"] == "inside a collective for 30 s"
    assert event["group 0 default_pg"] == "enqueued 7, started -1, completed 5"
    assert event["open"] == "2"
    assert event["oldest open"].startswith(
        "nccl:all_reduce in group 0 default_pg, number 2, scheduled, "
        "BFloat16 [[4096, 1, 5120]] -> [[4096, 1, 5120]], called "
    )
    files = sorted(path.name for path in watched.fake.directory.glob("flight_recorder.*"))
    assert files == [f"flight_recorder.{number}.json" for number in (3, 4, 5)]
    kept = json.loads((watched.fake.directory / files[-1]).read_bytes())
    assert kept["entries"] == watched.flight.entries


def test_an_incident_tells_what_has_ended_until_the_next_call(watched: Watched) -> None:
    def ends() -> list[tuple[int, int, bool]]:
        state = watched.rank.state(None, alive=True)
        assert state is not None
        return [(one.issued, one.ended, one.ends_are_known) for one in state.groups]

    for _ in range(5):
        watched.flight.call()
    watched.flight.complete(watched.flight.entries[:3])
    watched.serve(setup=flight.FlightSetup(handlers=[flight.OF_NCCL]))
    watched.until(lambda: watched.rank.has_header)
    watched.until(lambda: ends() == [(5, 0, False)])
    watched.rank.flight.incident("inside a collective for 30 s")
    watched.until(lambda: ends() == [(5, 3, True)])
    watched.flight.call()
    watched.until(lambda: ends() == [(6, 0, False)])


def test_a_rank_that_is_gone_leaves_no_socket(watched: Watched) -> None:
    for _ in range(4):
        watched.flight.call()
    server = watched.serve()
    watched.until(lambda: len(server.asked) > 2)
    watched.turn(gone=True)
    assert not server.socket.exists()
    assert [row[1:] for row in watched.rows] == [AS_THEY_ARE] * 4
    asked = len(server.asked)
    for _ in range(20):
        watched.turn(gone=True)
        time.sleep(0.01)
    assert len(server.asked) == asked


def test_that_something_ended_is_kept_where_nobody_knows_when(watched: Watched) -> None:
    setup = flight.FlightSetup(handlers=[flight.OF_OTHERS], polled=[flight.OF_OTHERS])
    for _ in range(4):
        watched.flight.call()
    for entry in watched.flight.entries:
        entry["profiling_name"] = "gloo:all_reduce"
        entry["retired"] = entry["record_id"] < 3
    server = watched.serve(setup=setup)
    watched.until(lambda: len(server.asked) > 3)
    assert not watched.rows  # its own source may still tell the time
    watched.turn(gone=True)
    told = (schema.ENDED, "flight recorder", schema.FLAG_ASYNC, -1, -1)
    assert [row[1:] for row in watched.rows] == [told, told, told, AS_THEY_ARE]


def test_without_a_setup_nobody_is_asked(watched: Watched) -> None:
    server = watched.serve()
    (watched.fake.directory / FLIGHT_SETUP).unlink()
    watched.flight.call()
    for _ in range(30):
        watched.turn()
        time.sleep(0.01)
    assert not server.asked


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    from rankscope.rank.hooks.flight_recorder import socket_address

    (deep / FLIGHT_SETUP).touch()
    address = socket_address(deep / "control.sock")
    assert len(address) < 100
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        assert (deep / "control.sock").is_socket()
