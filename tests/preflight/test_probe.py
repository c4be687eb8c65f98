"""What one agent says to another: dials and their classes, strangers, paths, transfers."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rankscope.preflight.probe import bulk, loss, mtu, path, wire
from rankscope.preflight.probe.dial import Caller, classify, dial, hang_up, knock
from rankscope.preflight.probe.listener import Listener, Stream
from rankscope.preflight.probe.transfers import Transfers
from tests.ports import free_port

TOKEN = "test"
CALLER = Caller(TOKEN, "b")


async def no_board(peer: str, stream: Stream) -> None:
    raise AssertionError(f"{peer} opened a board")


@asynccontextmanager
async def listening(node: str = "a", token: str = TOKEN) -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener(token, node, no_board)
    port = await listener.bind(0)
    try:
        yield listener, port
    finally:
        await listener.close()


@pytest.mark.parametrize(
    ("number", "elapsed_ms", "outcome"),
    [
        (errno.ECONNREFUSED, 1.1, "refused"),
        (errno.EHOSTUNREACH, 1.5, "prohibited"),
        (errno.EHOSTUNREACH, 3_061.0, "no-arp"),
        (errno.ENETUNREACH, 0.1, "no-route"),
        (errno.EPERM, 0.1, "local-firewall"),
        (errno.EACCES, 0.1, "local-firewall"),
        (errno.ETIMEDOUT, 130_000.0, "drop"),
        (None, 1_500.0, "drop"),
        (errno.EMFILE, 0.0, "error"),
    ],
)
def test_errno_and_time_tell_the_class(number: int | None, elapsed_ms: float, outcome: str) -> None:
    assert classify(number, elapsed_ms) == outcome


def test_an_agent_answers_with_its_name_and_our_address() -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            found = await knock(CALLER, "127.0.0.1", port, "a")
            assert (found.outcome, found.answered_by) == ("ok", "a")
            assert found.seen_address == found.local_address == "127.0.0.1"
            assert listener.heard == {"b"}

    asyncio.run(work())


def test_nothing_listens() -> None:
    found = asyncio.run(knock(CALLER, "127.0.0.1", free_port(), "a"))
    assert (found.outcome, found.errno) == ("refused", "ECONNREFUSED")


def test_another_node_has_the_address() -> None:
    async def work() -> None:
        async with listening("c") as (_, port):
            found = await knock(CALLER, "127.0.0.1", port, "a")
            assert (found.outcome, found.answered_by) == ("wrong-host", "c")

    asyncio.run(work())


def test_an_agent_of_another_run_gives_nothing_but_a_close() -> None:
    async def work() -> None:
        async with listening(token="other") as (listener, port):
            found = await knock(CALLER, "127.0.0.1", port, "a")
            assert (found.outcome, found.errno) == ("no-data", "EOF")
            assert listener.heard == set()

    asyncio.run(work())


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", b"\x00" * 5_000 + b"\n"]
)
def test_another_program_on_the_port(says: bytes) -> None:
    is_over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(says)
        await writer.drain()
        writer.close()
        is_over.set()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = await knock(CALLER, "127.0.0.1", port, "a")
        server.close()
        await is_over.wait()
        await asyncio.sleep(0.01)  # for the loop to close the connection
        assert found.outcome == ("not-us" if says else "no-data")
        assert found.banner.isprintable()
        assert len(found.banner) <= 60

    asyncio.run(work())


def test_silence_is_no_proof_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.preflight.probe.dial.ANSWER_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = asyncio.run(knock(CALLER, "127.0.0.1", silent.getsockname()[1], "a"))
    assert (found.outcome, found.errno) == ("no-data", "ETIMEDOUT")


@pytest.mark.parametrize(
    "says", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"\xff" * 99, b"x" * 3_000_000]
)
def test_a_stranger_gets_a_close_and_the_next_caller_an_answer(says: bytes) -> None:
    async def work() -> None:
        async with listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(says)
            if not says.endswith(b"\n"):
                writer.write_eof()
            try:
                assert await asyncio.wait_for(reader.read(), 5) == b""
            except ConnectionResetError:
                pass  # a close as well: with our bytes unread
            await hang_up(writer)
            assert (await knock(CALLER, "127.0.0.1", port, "a")).outcome == "ok"

    asyncio.run(work())


def test_a_path_is_measured_over_one_call() -> None:
    async def work() -> None:
        async with listening() as (_, port):
            _, call = await dial(CALLER, "127.0.0.1", port, "a", "path")
            assert call is not None
            rtt = await path.ping(call)
            assert rtt.num == path.NUM_PINGS
            assert 0 < rtt.min_ms <= rtt.median_ms <= rtt.p95_ms <= rtt.max_ms
            clock = await path.clock(call)
            assert abs(clock.offset_ms) <= clock.uncertainty_ms + 5  # one clock
            assert await path.echo_large(call) is not None
            await call.close()

    asyncio.run(work())


def test_an_idle_connection_is_tried_again_after_its_silence() -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            _, call = await dial(CALLER, "127.0.0.1", port, "a", "path")
            assert call is not None
            assert (await path.hold(call, 0.05)).error == ""
            await listener.close()  # as a firewall that forgets, with a reset
            assert (await path.hold(call, 0.05)).error
            await call.close()

    asyncio.run(work())


def test_the_mtu_of_loopback_is_that_of_its_interface() -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            udp = await listener.bind_udp()
            found = await mtu.measure(CALLER, "127.0.0.1", (port, udp), "a", 1.0)
            assert found.interface_bytes == mtu.mtu_of("lo")
            assert found.carried_bytes == found.interface_bytes
            assert found.large_ok

    asyncio.run(work())


def test_where_udp_is_closed_and_large_messages_pass_nothing_is_claimed() -> None:
    async def work() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            found = await mtu.measure(CALLER, "127.0.0.1", (1, port), "a", 1.0)
            assert (found.carried_bytes, found.large_ok) == (0, True)
            lost = await loss.measure(TOKEN, "127.0.0.1", port, 1.0)
            assert lost.num_answered == 0

    asyncio.run(work())


def test_datagrams_are_acknowledged_only_to_our_own() -> None:
    async def work() -> None:
        async with listening() as (listener, _):
            port = await listener.bind_udp()
            ours = await loss.measure(TOKEN, "127.0.0.1", port, 0.1)
            assert (ours.num_sent, ours.num_answered) == (loss.NUM_SENT, loss.NUM_SENT)
            theirs = await loss.measure("other", "127.0.0.1", port, 0.1)
            assert theirs.num_answered == 0

    asyncio.run(work())


def test_a_transfer_counts_both_directions_on_both_nodes() -> None:
    async def work() -> None:
        async with listening("a") as (there, port), listening("b") as (here, _):
            transfers = Transfers(CALLER, here)
            door = await knock(CALLER, "127.0.0.1", port, "a")
            await transfers.run([[("b", "a")]], lambda _: door, repeats=2)
            mine, theirs = transfers.bandwidth("a"), Transfers(Caller(TOKEN, "a"), there)
            back = theirs.bandwidth("b")
            assert mine is not None
            assert back is not None
            assert len(mine.rounds) == len(back.rounds) == 2
            assert mine.mbit_per_s == max(mine.rounds) > 10
            assert mine.again_mbit_per_s == -1
            await transfers.run_again([[("b", "a")]], lambda _: door)
            again = transfers.bandwidth("a")
            assert again is not None
            assert again.again_mbit_per_s == again.rounds[2]
            assert again.mbit_per_s == mine.mbit_per_s

    asyncio.run(work())


def test_a_node_is_in_one_transfer_at_a_time() -> None:
    async def work() -> None:
        async with listening("a") as (there, port):
            async with there.exclusive:
                _, call = await dial(CALLER, "127.0.0.1", port, "a", "send")
                assert call is not None
                assert call.is_busy
                await call.close()

    asyncio.run(work())


def test_a_receiver_that_hangs_costs_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LIMIT_S", 0.2)

    is_over = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):  # until the sender has had enough
            pass
        writer.close()
        is_over.set()

    async def work() -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(EOFError):
            await bulk.send(reader, writer)
        writer.write_eof()
        writer.close()
        server.close()
        await is_over.wait()
        await asyncio.sleep(0.01)  # for the loop to close both ends

    asyncio.run(work())


def test_words_of_another_run_do_not_prove_anything() -> None:
    line, nonce = wire.hello(TOKEN, "b", "a", "hello")
    said = wire.read_hello(TOKEN, line)
    with pytest.raises(wire.StrangerError):
        wire.read_hello("other", line)
    answer = wire.answer(TOKEN, said, "a", "127.0.0.1")
    assert wire.read_answer(TOKEN, nonce, answer).node == "a"
    with pytest.raises(wire.StrangerError):
        wire.read_answer(TOKEN, "another nonce", answer)


def test_a_frame_that_is_too_large_is_refused() -> None:
    async def work() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ValueError, match="bytes"):
            await wire.read_frame(reader)

    asyncio.run(work())
