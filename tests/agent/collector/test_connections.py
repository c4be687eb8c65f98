"""TCP connections as the kernel counts them, of real sockets of this process over loopback."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from rankscope.node.columns import sample_chunk
from rankscope.node.sources.base import RankProcess, Row, Skipped
from rankscope.node.sources.connections import MAX_CONNECTIONS, ConnectionSource
from rankscope.node.sources.machine import Machine
from rankscope.node.sources.netlink import (
    Address,
    Counters,
    TcpConnection,
    _attributes,
    _counters,
    address_text,
    established,
    port_of,
)
from rankscope_trainer.faults.connections import limit_rate, lose_arriving, lose_nothing

linux = pytest.mark.skipif(sys.platform != "linux", reason="netlink is Linux's")
MIB = 1 << 20
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connect() -> Iterator[Callable[..., Pair]]:
    """Return a function that makes a connection of this process with itself."""
    made: list[socket.socket] = []

    def pair(host: str = "127.0.0.1") -> Pair:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((host, 0))
            listening.listen()
            client = socket.create_connection(listening.getsockname()[:2])
            server, _ = listening.accept()
        made.extend((client, server))
        return client, server

    yield pair
    for each in made:
        each.close()


def inode(each: socket.socket) -> int:
    return os.fstat(each.fileno()).st_ino


def seen(*ends: socket.socket) -> list[TcpConnection]:
    by_inode = {one.inode: one for one in established([inode(each) for each in ends])}
    return [by_inode[inode(each)] for each in ends]


def carry(pair: Pair, num_bytes: int) -> None:
    """Send and read so much."""
    reader = threading.Thread(target=read, args=(pair[1], num_bytes))
    reader.start()
    pair[0].sendall(bytes(num_bytes))
    reader.join(20)


def read(end: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0 and (got := len(end.recv(1 << 16))):
        num_bytes -= got


def wait_for(check: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@linux
@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.needs("ipv6"))]
)
def test_both_ends_are_told_with_their_addresses(connect: Callable[..., Pair], host: str) -> None:
    pair = connect(host)
    carry(pair, 3 * MIB)
    wait_for(lambda: seen(pair[0])[0].counters.acknowledged_bytes >= 3 * MIB)
    one, other = seen(*pair)
    assert (one.local, one.remote) == (other.remote, other.local)
    assert port_of(one.local) == pair[0].getsockname()[1]
    assert address_text(one.local).startswith("[::1]:" if ":" in host else "127.0.0.1:")
    assert one.counters.acknowledged_bytes - 3 * MIB in (0, 1)  # 1: the kernel counts the SYN
    assert other.counters.received_bytes == 3 * MIB
    assert one.counters.sent_segments > 0
    assert one.counters.in_flight_segments == one.counters.unsent_bytes == 0
    assert one.control


@linux
def test_nothing_is_dropped_where_there_is_room_for_all(connect: Callable[..., Pair]) -> None:
    pair = connect("127.0.0.1")
    carry(pair, 1 << 10)
    assert [one.drops for one in seen(*pair)] == [0, 0]


@linux
@pytest.mark.needs("ipv6")
def test_an_ipv4_address_is_the_same_in_either_family() -> None:
    with socket.socket(socket.AF_INET6) as listening:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("::", 0))
        listening.listen()
        with socket.create_connection(("127.0.0.1", listening.getsockname()[1])) as client:
            server, _ = listening.accept()
            with server:
                one, other = seen(client, server)
                assert (one.local, one.remote) == (other.remote, other.local)


@linux
def test_a_paced_connection_is_busy_and_its_data_waits_at_the_sender(
    connect: Callable[..., Pair],
) -> None:
    slow, fast = connect(), connect()
    limit_rate(slow[0], MIB)
    reader = threading.Thread(target=read, args=(slow[1], 2 * MIB))
    reader.start()
    sender = threading.Thread(target=slow[0].sendall, args=(bytes(2 * MIB),))
    sender.start()
    held = 0
    while reader.is_alive():
        (one,) = seen(slow[0])
        values = one.counters
        held += values.unsent_bytes > 0 and (
            2 * values.in_flight_segments < values.congestion_segments
        )
        time.sleep(0.1)
    sender.join()
    carry(fast, 2 * MIB)
    paced, free = (end.counters for end in seen(slow[0], fast[0]))
    assert held >= 5
    assert paced.busy_us > 1_000_000
    assert free.busy_us < paced.busy_us / 3


@linux
@pytest.mark.needs("socket-filters")
def test_what_is_lost_is_sent_again_and_counted_where_it_was_thrown_away(
    connect: Callable[..., Pair],
) -> None:
    pair = connect()
    carry(pair, MIB)
    lose_arriving(pair[1], 1.0)
    pair[0].sendall(bytes(1000))
    wait_for(lambda: seen(pair[0])[0].counters.backoff >= 2)
    sender, receiver = seen(*pair)
    assert sender.counters.retransmitted_segments >= 2
    assert sender.counters.in_flight_segments >= 1
    assert receiver.drops >= 3
    lose_nothing(pair[1])
    wait_for(lambda: seen(pair[0])[0].counters.in_flight_segments == 0)
    (sender,) = seen(pair[0])
    assert sender.counters.backoff == 0
    assert sender.counters.needless_segments == 0


# --- the source: ranks of a tree, connections as they are given -------------------------------


class World:
    """Processes with sockets, and the kernel's answer about them."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.found: list[TcpConnection] = []
        self.ranks: list[RankProcess] = []
        (proc / "net").mkdir(parents=True)
        (proc / "net/tcp").write_text("")

    def process(self, rank: int, inodes: Sequence[int], environ: str = "") -> None:
        pid = 100 + rank
        self.ranks.append(RankProcess(0, rank, pid))
        (self.proc / str(pid) / "fd").mkdir(parents=True)
        (self.proc / str(pid) / "environ").write_text(environ)
        for number, name in enumerate([f"socket:[{i}]" for i in inodes] + ["pipe:[9]"]):
            (self.proc / str(pid) / "fd" / str(number)).symlink_to(name)

    def source(self) -> ConnectionSource:
        def answer(inodes: Collection[int]) -> list[TcpConnection]:
            return [one for one in self.found if one.inode in inodes]

        made = ConnectionSource(
            Machine(proc=self.proc, ranks=lambda: tuple(self.ranks), connections=answer)
        )
        made.open()
        return made


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "proc")


def end(number: int, local: str, remote: str, **counters: int) -> TcpConnection:
    values = dict.fromkeys(Counters._fields, 0) | {"acknowledged_bytes": 1} | counters
    return TcpConnection(number, packed(local), packed(remote), "cubic", 0, Counters(**values))


def packed(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return socket.inet_aton(host), int(port).to_bytes(2, "big")


def sampled(source: ConnectionSource) -> list[Row]:
    return list(source.sample())


def test_only_connections_that_may_lead_to_another_rank_are_told(world: World) -> None:
    world.process(0, [1, 2, 3, 4, 7], "HOME=/\0MASTER_PORT=29500\0X=1\0")
    world.process(1, [5])
    world.found = [
        end(1, "10.0.0.1:4000", "10.0.0.2:29500"),  # the store
        end(2, "127.0.0.1:5000", "127.0.0.1:5001"),  # to itself
        end(3, "127.0.0.1:5001", "127.0.0.1:5000"),
        end(4, "10.0.0.1:6000", "10.0.0.1:6001"),
        end(5, "10.0.0.1:6001", "10.0.0.1:6000"),
        end(6, "10.0.0.1:7000", "10.0.0.1:7001"),  # of no rank
        end(7, "10.0.0.1:8000", "203.0.113.9:443"),  # storage
    ]
    told = {(row["rank"], row["local"]) for row in sampled(world.source())}
    assert told == {(0, "10.0.0.1:6000"), (1, "10.0.0.1:6001")}


def test_what_does_not_move_has_no_row_unless_it_is_stuck(world: World) -> None:
    world.process(0, [1, 2, 3])
    world.found = [
        end(1, "10.0.0.1:5001", "10.0.0.2:5001"),
        end(2, "10.0.0.1:5002", "10.0.0.2:5002", in_flight_segments=3, backoff=4),
        end(3, "10.0.0.1:5003", "10.0.0.2:5003"),
    ]
    source = world.source()
    assert len(sampled(source)) == 3
    world.found[2] = end(3, "10.0.0.1:5003", "10.0.0.2:5003", received_bytes=50)
    rows = sampled(source)
    assert [row["local"] for row in rows] == ["10.0.0.1:5002", "10.0.0.1:5003"]
    assert rows[0]["backoff"] == 4


def test_of_a_thousand_connections_those_that_tell_most_are_sent(world: World) -> None:
    count = 1024
    world.process(0, range(1, count + 1))
    world.found = [
        end(
            n, f"10.0.0.1:{5000 + n}", f"10.0.{n // 250}.2:{5000 + n}", acknowledged_bytes=10**6 * n
        )
        for n in range(1, count + 1)
    ]
    counters = world.found[4].counters._replace(backoff=1, in_flight_segments=1)
    world.found[4] = world.found[4]._replace(counters=counters)
    rows = sampled(world.source())
    assert len(rows) == MAX_CONNECTIONS
    assert rows[0]["local"] == "10.0.0.1:5005"  # it is stuck
    assert {row["local"] for row in rows[1:]} == {
        f"10.0.0.1:{5000 + n}" for n in range(count, count - MAX_CONNECTIONS + 1, -1)
    }


def test_a_sender_that_paces_itself_has_no_window(world: World) -> None:
    world.process(0, [1, 2])
    open_window = {"congestion_segments": 30, "segment_bytes": 1000, "receiver_bytes": 20_500}
    world.found = [end(n, f"10.0.0.1:500{n}", f"10.0.0.2:500{n}", **open_window) for n in (1, 2)]
    world.found[1] = world.found[1]._replace(control="bbr2")
    windows = {row["local"]: row["window_segments"] for row in sampled(world.source())}
    assert windows == {"10.0.0.1:5001": 20, "10.0.0.1:5002": -1}


def test_new_sockets_are_seen_and_processes_that_are_gone_forgotten(world: World) -> None:
    world.process(0, [1])
    world.found = [
        end(1, "10.0.0.1:5001", "10.0.0.2:5001"),
        end(2, "10.0.0.1:5002", "10.0.0.2:5002"),
    ]
    source = world.source()
    assert len(sampled(source)) == 1
    (world.proc / "100/fd/9").symlink_to("socket:[2]")
    assert [row["local"] for row in sampled(source)] == ["10.0.0.1:5002"]
    world.ranks.clear()
    assert sampled(source) == []
    assert not source._files
    assert not source._store


def test_where_the_kernel_refuses_it_is_skipped_with_the_reason(world: World) -> None:
    def refuse(inodes: Collection[int]) -> list[TcpConnection]:
        raise OSError(1, "Operation not permitted")

    with pytest.raises(Skipped, match="not permitted"):
        ConnectionSource(Machine(proc=world.proc, connections=refuse)).open()


def test_a_busy_node_sends_few_bytes(world: World) -> None:
    """Eight ranks with sixteen connections each, all moving: below 200 bytes a second and rank."""
    ranks, rows = 8, []
    for rank in range(ranks):
        world.process(rank, [100 * rank + n for n in range(16)])
    source = world.source()
    for sample in range(1, 4):
        world.found = [
            end(
                100 * rank + n, f"10.0.0.1:{4000 + 100 * rank + n}", f"10.0.1.{n}:{5000 + rank}",
                acknowledged_bytes=sample * (10**8 + 7919 * n), busy_us=sample * 40_000 * (n + 1),
                sent_segments=sample * (3000 + n), unsent_bytes=8191 * (n % 3),
                in_flight_segments=n % 5, congestion_segments=10 + n, receiver_bytes=1 << 22,
                segment_bytes=1448,
            )
            for rank in range(ranks)
            for n in range(16)
        ]  # fmt: skip
        times = {"time_ns": 1_790_000_000 * 10**9 + sample * 2 * 10**9, "interval_ns": 2 * 10**9}
        rows += [{**times, **row} for row in source.sample()]
    assert len(rows) == 3 * 16 * ranks
    size = len(sample_chunk("connections", rows, "host").data)
    assert size / ranks / 6 < 200


@linux
def test_a_dump_of_many_sockets_is_cheap(connect: Callable[..., Pair]) -> None:
    pairs = [connect() for _ in range(100)]
    mine = [inode(each) for pair in pairs for each in pair]
    spent = []
    for _ in range(5):  # all sockets of the machine are dumped: the least is what it takes
        began = time.thread_time()
        found = established(mine)
        spent.append(time.thread_time() - began)
        assert len(found) == 200
    assert min(spent) < 0.1


def test_a_damaged_answer_is_no_crash() -> None:
    assert list(_attributes(struct.pack("=HH", 2, 9), 0)) == []  # cut off: no fields
    assert list(_attributes(struct.pack("=HH", 0, 2), 0)) == []


def test_what_an_older_kernel_does_not_tell_is_not_known() -> None:
    """Linux 4.9 ended with what was limited by the send buffer."""
    told = _counters(struct.pack("=4xB", 3).ljust(192, b"\0"))
    assert (told.backoff, told.busy_us, told.needless_segments, told.receiver_bytes) == (
        3,
        0,
        -1,
        -1,
    )
