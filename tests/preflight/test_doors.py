"""Random ports: which are dialled, when a failed dial counts, what a hole looks like."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.key import RunKey
from rankscope.preflight.probe import doors
from rankscope.preflight.probe.dial import Caller
from rankscope.preflight.probe.doors import Doors, House
from rankscope.preflight.probe.listener import Listener

KEY = RunKey.of("test", "run")
CALLER = Caller(KEY, "b")
LOW, HIGH = 32768, 60999
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.preflight.probe.dial.ANSWER_LIMIT_S", 0.3)
    for name in ("DATA_LIMIT_S", "AGAIN_AFTER_S", "PROBE_LIMIT_S"):
        monkeypatch.setattr(doors, name, 0.3)
    for name in ("AGAIN_PAUSE_S", "GENTLE_S", "SLOW_S", "SPACING_S"):
        monkeypatch.setattr(doors, name, 0.01)


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener(KEY, "a", _no_board)
    try:
        yield listener
    finally:
        await listener.close()


async def _no_board(peer: str, link: object) -> None:
    raise AssertionError(f"{peer} opened a board")


@asynccontextmanager
async def stranger(answer: Answer) -> AsyncIterator[int]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.01)


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass
    writer.close()


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()
    writer.close()


async def asked(ports: tuple[int, ...], decoy: int = 0) -> EdgeFacts:
    told: dict[str, Any] = {}
    house = House("a", "127.0.0.1", ports, decoy, LOW, HIGH)
    await Doors(CALLER).ask(house, lambda **fields: told.update(fields))
    return msgspec.structs.replace(EdgeFacts(), **told)


@pytest.mark.parametrize("num", [1, 3, 24])
@pytest.mark.parametrize("start", [0.0, 0.37, 0.999])
def test_ports_are_equally_far_apart(num: int, start: float) -> None:
    parts = doors.spread(LOW, HIGH, num, start)
    first = [part[0] for part in parts]
    gaps = [b - a for a, b in itertools.pairwise(first)]
    assert len(first) == num
    assert first[0] >= LOW
    assert first[-1] <= HIGH
    assert all(gap <= (HIGH - LOW + 1) // num + 1 for gap in gaps)


def test_a_hole_as_wide_as_a_part_holds_a_port_wherever_it_begins() -> None:
    width = (HIGH - LOW + 1) // doors.NUM_PORTS + 1
    for start in (0.0, 0.2, 0.5, 0.99):
        ports = [part[0] for part in doors.spread(LOW, HIGH, doors.NUM_PORTS, start)]
        for low in range(LOW, HIGH - width + 2, 97):
            assert any(low <= port < low + width for port in ports), (start, low)


def test_a_range_may_be_smaller_than_what_is_wanted() -> None:
    assert [part[0] for part in doors.spread(5, 7, 24, 0.9)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("num_peers", "num"), [(1, 24), (2, 24), (4, 24), (7, 12), (15, 6), (63, 3), (999, 3)]
)
def test_the_more_peers_the_fewer_dials_of_each(num_peers: int, num: int) -> None:
    ports = tuple(range(24))
    drawn = [doors.chosen(ports, place, num_peers) for place in range(num_peers + 1)]
    assert {len(some) for some in drawn} == {num}
    assert num * num_peers <= max(doors.MOST_DIALS, doors.LEAST_DIALS * num_peers)
    if num_peers >= 24 // num:
        assert {port for some in drawn for port in some} == set(ports)  # together all of them


def test_few_files_mean_few_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, num in ((64, 3), (128, 10), (1024, 24), (-1, 24)):
        monkeypatch.setattr(doors.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert doors.most_ports() == num


def test_ports_that_the_kernel_hands_to_nobody_are_left_out() -> None:
    async def work() -> None:
        async with listening() as listener:
            ports = await listener.bind_spread(LOW, HIGH, ((LOW, 50000),))
            assert ports
            assert min(ports) > 50000

    asyncio.run(work())


def test_open_ports_are_told_by_a_few_dials_and_the_numbers_of_the_rest() -> None:
    async def work() -> None:
        async with listening() as listener:
            ports = await listener.bind_spread(LOW, HIGH)
            found = await asked(ports, listener.bind_shut())
            assert len(ports) == doors.NUM_PORTS
            assert [dial.outcome for dial in found.ephemeral] == ["ok"] * doors.NUM_KEPT
            told = [*found.ephemeral_ok, *(dial.port for dial in found.ephemeral)]
            assert sorted(told) == sorted(ports)
            assert (found.ephemeral_shut, found.decoy) == ((), "")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("answer", "outcome", "errno"),
    [(hang, "no-data", "ETIMEDOUT"), (close, "no-data", "EOF"), (http, "not-us", "")],
)
def test_what_is_accepted_and_carries_nothing_of_ours_is_no_path(
    answer: Answer, outcome: str, errno: str
) -> None:
    async def work() -> None:
        async with stranger(answer) as port, listening() as listener:
            found = await asked((port,), listener.bind_shut())
            (dial,) = found.ephemeral
            assert (dial.outcome, dial.errno) == (outcome, errno)
            assert found.decoy == "refused"  # nobody listens there, and nobody pretends to

    asyncio.run(work())


def test_a_slow_answer_is_asked_for_again_before_it_accuses() -> None:
    tries: list[float] = []

    async def once(limit_s: float) -> Dial:
        tries.append(limit_s)
        outcome = "no-data" if len(tries) == 1 else "ok"
        await asyncio.sleep(1.0 if len(tries) == 1 else 0.01)
        return Dial(outcome=outcome, address="x", port=1)  # type: ignore[arg-type]

    found, is_rescued = asyncio.run(doors._twice(once, 0.5))
    assert (found.outcome, is_rescued) == ("ok", True)
    assert len(tries) == 2


def test_silence_counts_only_where_a_port_is_silent_at_rest_too() -> None:
    async def work() -> None:
        async with listening() as listener, stranger(hang) as dumb:
            alive, *_ = await listener.bind_spread(LOW, HIGH)
            before = [
                Dial(outcome="no-data", errno="ETIMEDOUT", address="127.0.0.1", port=port)
                for port in (alive, dumb)
            ]
            again = await Doors(CALLER).confirm("a", before)
            assert {dial.port: found.outcome for dial, found in again.items()} == {
                alive: "ok", dumb: "no-data",
            }  # fmt: skip

    asyncio.run(work())


def test_a_port_that_answers_when_dialled_slowly_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: dict[int, int] = {}

    async def once(self: Doors, house: House, port: int, limit_s: float) -> Dial:
        tries[port] = tries.get(port, 0) + 1
        outcome = "drop" if port % 2 and tries[port] <= 2 else "ok"  # a limit of new connections
        return Dial(outcome=outcome, address="127.0.0.1", port=port)  # type: ignore[arg-type]

    monkeypatch.setattr(Doors, "_once", once)
    found = asyncio.run(asked(tuple(range(40000, 40024))))
    assert {dial.outcome for dial in found.ephemeral} == {"ok"}
    assert found.ephemeral_shut == ()


def test_the_ends_of_a_hole_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_closed(port: int) -> bool:
        return 41000 <= port <= 46000

    async def once(self: Doors, house: House, port: int, limit_s: float) -> Dial:
        outcome = "drop" if is_closed(port) else "ok"
        return Dial(outcome=outcome, address="127.0.0.1", port=port)  # type: ignore[arg-type]

    async def touch(address: str, port: int) -> str:
        return "drop" if is_closed(port) else "refused"

    monkeypatch.setattr(Doors, "_once", once)
    monkeypatch.setattr(doors, "touch", touch)
    ports = tuple(part[0] for part in doors.spread(LOW, HIGH, 24, 0.5))
    found = asyncio.run(asked(ports))
    closed = [*found.ephemeral_shut, *(d.port for d in found.ephemeral if d.outcome == "drop")]
    assert 41000 <= min(closed) < 41100
    assert 45900 < max(closed) <= 46000
    assert not [port for port in found.ephemeral_ok if is_closed(port)]
