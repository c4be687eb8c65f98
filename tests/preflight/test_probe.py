"""What one agent says to another: dials and their classes, strangers, paths, transfers."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts.endpoint import Endpoint
from rankscope.preflight.key import RunKey
from rankscope.preflight.model import NodeReport
from rankscope.preflight.probe import bulk, endpoint, loss, mtu, path, wire
from rankscope.preflight.probe import prober as prober_module
from rankscope.preflight.probe.dial import Caller, classify, dial, hang_up, knock
from rankscope.preflight.probe.listener import MAX_UNPROVEN_OF_ONE, Listener
from rankscope.preflight.probe.mesh import Mesh
from rankscope.preflight.probe.prober import COLLECTIVE, Goal, Prober
from rankscope.preflight.probe.transfers import Transfers
from rankscope.preflight.system import Resolved, System
from tests.ports import free_port

KEY = RunKey.of("a secret of the tests, long enough", "run")
OTHER = RunKey.of("another secret of the tests, as long", "run")
BOTH: dict[wire.By, RunKey] = {"agent": KEY, "server": KEY}
CALLER = Caller(KEY, "b")


async def no_board(peer: str, link: wire.Link) -> None:
    raise AssertionError(f"{peer} opened a board")


@asynccontextmanager
async def listening(node: str = "a", key: RunKey = KEY) -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener(key, node, no_board)
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
        (errno.EADDRNOTAVAIL, 0.1, "no-local-port"),
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


def test_a_port_is_lent_and_left_without_a_gap() -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            assert listener.lend(port + 1) is None
            lent = listener.lend(port)
            assert lent is not None
            assert (await knock(CALLER, "127.0.0.1", port, "a")).outcome == "ok"
            listener.leave(port)
            lent.setblocking(False)
            loop = asyncio.get_running_loop()
            calling = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", port))
            taken, _ = await asyncio.wait_for(loop.sock_accept(lent), 5.0)
            _, writer = await calling
            await hang_up(writer)
            taken.close()
            lent.close()
            refused = await knock(CALLER, "127.0.0.1", port, "a")
            assert refused.outcome == "refused"

    asyncio.run(work())


def test_the_endpoint_is_called_as_it_was_given_whoever_answers() -> None:
    async def work() -> None:
        async with listening("c") as (_, port):
            asked = []

            async def resolve(name: str) -> Resolved:
                asked.append(name)
                return Resolved(name=name, addresses=("127.0.0.9", "127.0.0.1"))

            given = Endpoint(name="head", port=port, is_said=True)
            found = await endpoint.ask(CALLER, given, resolve)
            assert (asked, found.addresses) == (["head"], ("127.0.0.9", "127.0.0.1"))
            assert found.dial is not None
            assert (found.dial.outcome, found.dial.answered_by) == ("ok", "c")
            itself = await endpoint.ask(Caller(CALLER.key, "c"), given, resolve)
            assert itself.dial is not None
            assert itself.dial.answered_by == "c"

    asyncio.run(work())


def test_an_endpoint_that_does_not_resolve_is_not_called() -> None:
    async def resolve(name: str) -> Resolved:
        return Resolved(name=name, error="EAI_NONAME")

    found = asyncio.run(endpoint.ask(CALLER, Endpoint(name="head", port=1), resolve))
    assert (found.addresses, found.dial) == ((), None)


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
        async with listening(key=OTHER) as (listener, port):
            found = await knock(CALLER, "127.0.0.1", port, "a")
            assert (found.outcome, found.errno) == ("other-secret", "")
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
        await hang_up(writer)
        is_over.set()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = await knock(CALLER, "127.0.0.1", port, "a")
        server.close()
        await is_over.wait()
        assert found.outcome == ("not-us" if says else "no-data")
        assert found.banner.isprintable()
        assert len(found.banner) <= 60

    asyncio.run(work())


def test_an_agent_of_an_older_version_is_told_from_a_firewall() -> None:
    run = b"rankscope preflight run "
    token = hashlib.sha256(run).hexdigest()[:32].encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = json.loads(await reader.readline())
        words = f"{said['nonce']}|{said['node']}>{said['op']}".encode()
        proof = hmac.new(token, words, hashlib.sha256).hexdigest()[:32]
        if said["proof"] == proof:  # as version 1 did; to all others a close
            writer.write(b'{"rankscope_preflight":1,"node":"a","seen":"","proof":""}\n')
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        found = await knock(CALLER, "127.0.0.1", server.sockets[0].getsockname()[1], "a")
        server.close()
        assert (found.outcome, found.banner) == ("other-version", "an older rankscope")

    asyncio.run(work())


def test_one_who_speaks_another_version_is_refused_in_a_line() -> None:
    async def work() -> None:
        async with listening() as (_, port):
            for version in (1, 3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(json.dumps({"rankscope_preflight": version}).encode() + b"\n")
                said = await asyncio.wait_for(reader.read(), 5)
                assert said == b'{"rankscope_preflight":2,"refused":"version"}\n'
                await hang_up(writer)

    asyncio.run(work())


def test_idle_strangers_do_not_keep_peers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.preflight.probe.listener.HELLO_LIMIT_S", 60.0)

    async def work() -> None:
        async with listening() as (listener, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(400)]
            for _ in range(3):
                assert (await knock(CALLER, "127.0.0.1", port, "a")).outcome == "ok"
            assert len(listener._open) <= MAX_UNPROVEN_OF_ONE + 1
            for _, writer in idle:
                await hang_up(writer)

    asyncio.run(work())


def test_a_server_may_knock_and_no_more() -> None:
    words = RunKey.of(KEY.words_for_server())

    async def work() -> None:
        async with listening() as (listener, port):
            caller = Caller(words, "rankscope-server", by="server")
            found, call = await dial(caller, "127.0.0.1", port, "a")
            assert found.outcome == "ok"
            assert call is not None
            await call.close()
            found, call = await dial(caller, "127.0.0.1", port, "a", "board")
            assert (call, found.outcome) == (None, "no-data")
            as_agent = Caller(words, "b")
            assert (await knock(as_agent, "127.0.0.1", port, "a")).outcome == "other-secret"
            assert listener.heard == set()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("node", "key", "outcome"), [("a", OTHER, "other-secret"), ("c", KEY, "wrong-host")]
)
def test_an_agent_that_is_none_of_ours_is_remembered_after_its_end(
    node: str, key: RunKey, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls go to two ports in turn, and it may give up before we do."""
    calls: list[Any] = []

    async def noted(*call: Any, **more: Any) -> Any:
        answer = await dial(*call, **more)
        calls.append(answer)
        return answer

    monkeypatch.setattr(prober_module, "dial", noted)
    monkeypatch.setattr(prober_module, "MEET_PAUSE_S", 0.02)

    async def work() -> None:
        exchange = Exchange(NodeReport(node="b"))
        prober = Prober(
            System(), CALLER, exchange, Mesh(exchange, lambda _peer, _how: None), lambda: None
        )
        async with listening(node, key) as (_, port):
            goal = Goal(is_named=True, master="", master_addr="", master_port=port)
            meeting = asyncio.create_task(prober.meet("localhost", goal))
            while "localhost" not in prober.edges or prober.edges["localhost"].mesh is None:
                await asyncio.sleep(0.01)
        before = len(calls)
        while len(calls) < before + 10:
            await asyncio.sleep(0.01)
            found = prober.edges["localhost"].mesh
            assert found is not None
            assert found.outcome == outcome
        meeting.cancel()
        await prober.close()

    asyncio.run(work())


def test_an_agent_of_another_preflight_of_ours_says_which() -> None:
    async def work() -> None:
        async with listening(key=RunKey(KEY.secret, "another")) as (listener, port):
            found = await knock(CALLER, "127.0.0.1", port, "a")
            assert (found.outcome, found.banner) == ("other-run", "another")
            assert listener.heard == set()

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
            lost = await loss.measure(KEY, "127.0.0.1", port, 1.0)
            assert lost.num_answered == 0

    asyncio.run(work())


def test_datagrams_are_acknowledged_only_to_our_own() -> None:
    async def work() -> None:
        async with listening() as (listener, _):
            port = await listener.bind_udp()
            ours = await loss.measure(KEY, "127.0.0.1", port, 0.1)
            assert (ours.num_sent, ours.num_answered) == (loss.NUM_SENT, loss.NUM_SENT)
            assert ours.num_arrived == loss.NUM_SENT  # as the far end counted
            theirs = await loss.measure(OTHER, "127.0.0.1", port, 0.1)
            assert theirs.num_answered == 0

    asyncio.run(work())


def test_a_transfer_counts_both_directions_on_both_nodes() -> None:
    async def work() -> None:
        async with listening("a") as (there, port), listening("b") as (here, _):
            transfers = Transfers(CALLER, here)
            door = await knock(CALLER, "127.0.0.1", port, "a")
            await transfers.run([[("b", "a")]], lambda _: door, repeats=2)
            mine, theirs = transfers.bandwidth("a"), Transfers(Caller(KEY, "a"), there)
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
        await hang_up(writer)
        is_over.set()

    async def work() -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(EOFError):
            await bulk.send(wire.Link(reader, writer, (b"1", b"2")))
        writer.write_eof()
        await hang_up(writer)
        server.close()
        await is_over.wait()

    asyncio.run(work())


def test_words_of_another_secret_do_not_prove_anything() -> None:
    caller = wire.Speaker(KEY, "b")
    line = caller.say_hello("a", "hello")
    with pytest.raises(wire.StrangerError) as refused:
        wire.Speaker.called({"agent": OTHER}, "a", line)
    assert refused.value.why == "other-secret"
    called, said = wire.Speaker.called({"agent": KEY}, "a", line)
    assert (said.node, said.to) == ("b", "a")
    answer = called.say_challenge("127.0.0.1", is_busy=False)
    assert caller.hear_challenge(answer).node == "a"
    called.hear_confirm(caller.say_confirm())
    with pytest.raises(wire.StrangerError):
        wire.Speaker(OTHER, "b").hear_challenge(answer)


def is_refused(hear: Callable[[], object]) -> bool:
    """Return whether what was said is taken for a stranger's."""
    try:
        hear()
    except wire.StrangerError:
        return True
    return False


async def read_twice(link: wire.Link) -> None:
    await link.read()
    await link.read()


def changes(line: bytes) -> list[tuple[str, bytes]]:
    """Return the line with each of its fields changed, one at a time."""
    words = json.loads(line)
    found = []
    for name, value in words.items():
        other: object = not value if isinstance(value, bool) else f"{value}x"
        other = {"op": "board", "by": "server"}.get(name, other)
        other = 1 if name == "rankscope_preflight" else other
        found.append((name, json.dumps({**words, name: other}).encode() + b"\n"))
    return found


def test_no_field_of_a_hello_can_be_changed() -> None:
    line = wire.Speaker(KEY, "b").say_hello("a", "hello")
    for name, forged in changes(line):
        assert is_refused(lambda line=forged: wire.Speaker.called(BOTH, "a", line)), name


def test_no_field_of_a_challenge_can_be_changed_and_none_is_of_another_call() -> None:
    caller, other = wire.Speaker(KEY, "b"), wire.Speaker(KEY, "b")
    called, _ = wire.Speaker.called({"agent": KEY}, "a", caller.say_hello("a", "hello"))
    other.say_hello("a", "hello")
    line = called.say_challenge("127.0.0.1", is_busy=False)
    for name, forged in changes(line):
        assert is_refused(lambda line=forged: caller.hear_challenge(line)), name
    assert is_refused(lambda: other.hear_challenge(line))


def test_a_recorded_call_gets_a_challenge_that_nobody_can_answer() -> None:
    caller = wire.Speaker(KEY, "b")
    line = caller.say_hello("a", "board")
    first, _ = wire.Speaker.called({"agent": KEY}, "a", line)
    caller.hear_challenge(first.say_challenge("127.0.0.1", is_busy=False))
    confirm = caller.say_confirm()
    again, _ = wire.Speaker.called({"agent": KEY}, "a", line)
    again.say_challenge("127.0.0.1", is_busy=False)
    with pytest.raises(wire.StrangerError):
        again.hear_confirm(confirm)
    first.hear_confirm(confirm)


def fed(frames: bytes, limit_bytes: int = 1000) -> wire.Link:
    """Return a link that reads `frames`; the keys of a caller are `there` and `back`."""
    reader = asyncio.StreamReader()
    reader.feed_data(frames)
    reader.feed_eof()
    return wire.Link(reader, Writer(), (b"there", b"back"), limit_bytes)  # type: ignore[arg-type]


class Writer:
    """Keeps what was written."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.data.append(data)


def test_frames_come_whole_once_and_in_order() -> None:
    async def work() -> None:
        writer = Writer()
        sender = wire.Link(asyncio.StreamReader(), writer, (b"back", b"there"))  # type: ignore[arg-type]
        for word in (b"one", b"two", b""):
            sender.write(word)
        one, two, empty = writer.data
        link = fed(one + two + empty)
        assert [await link.read() for _ in range(3)] == [b"one", b"two", b""]
        for frames in (two, one + one, one + empty, one[:-1] + b"x" + two, bytes(64)):
            with pytest.raises(ValueError, match="did not send"):
                await read_twice(fed(frames))
        with pytest.raises(EOFError):
            await fed(one[:-1]).read()
        mine = wire.Link(asyncio.StreamReader(), writer, (b"there", b"back"))  # type: ignore[arg-type]
        mine.write(b"one")
        with pytest.raises(ValueError, match="did not send"):  # sent back to us
            await fed(writer.data[-1]).read()

    asyncio.run(work())


def test_a_frame_that_is_too_large_is_refused() -> None:
    async def work() -> None:
        with pytest.raises(ValueError, match="bytes"):
            await fed((1001).to_bytes(4, "big")).read()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("words", "told"),
    [(COLLECTIVE, "the collective of another preflight"), ("train.py", "")],
)
def test_the_store_of_another_preflight_is_no_stranger(words: str, told: str) -> None:
    """While its collective runs a torch process has MASTER_PORT, and no agent answers there."""

    async def work(port: int) -> str:
        exchange = Exchange(NodeReport(node="b"))
        mesh = Mesh(exchange, lambda _peer, _how: None)
        prober = Prober(System(), CALLER, exchange, mesh, lambda: None)
        try:
            return await prober.other_preflight(port)
        finally:
            await prober.close()

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        program = "import time; time.sleep(60)"
        holder = subprocess.Popen(
            [sys.executable, "-c", program, words], pass_fds=(sock.fileno(),),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        assert asyncio.run(work(port)) == told
    finally:
        holder.kill()
        holder.wait()
