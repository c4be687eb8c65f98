"""Answers the peers of this run on MASTER_PORT and on random ports, while preflight runs.

A caller that has not proven the run's secret gets little: a few places that others of its address
share, of which the oldest is given up for a newcomer, 2 kB of memory and three seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from rankscope.preflight.key import RunKey
from rankscope.preflight.probe import bulk, doors, wire
from rankscope.preflight.probe.datagrams import Acknowledger
from rankscope.preflight.probe.dial import hang_up, plain

MAX_CALLS = 512  # open at a time, of peers
MAX_UNPROVEN, MAX_UNPROVEN_OF_ONE = 256, 64  # open at a time, of all addresses and of one
HELLO_LIMIT_S = 3.0
MAX_REFUSALS, REFUSALS_PER_S = 200, 100.0  # lines that give a stranger the reason
_BACKLOG = 1024
_PLACES = 8  # tries to find a free port in each part of the range
_SHARE = 4  # of a small range, the part that is taken
_NO_FILES_PAUSE_S = 0.05  # after an accept that failed: out of files, or the caller has gone


class Listener:
    """The listening side of one node. `on_board` gets the links that carry reports."""

    def __init__(
        self, key: RunKey, node: str, on_board: Callable[[str, wire.Link], Awaitable[None]],
        max_frame_bytes: int = wire.MAX_FRAME_BYTES,
    ) -> None:  # fmt: skip
        self._keys: dict[wire.By, RunKey] = {
            "agent": key, "server": RunKey.of(key.words_for_server()),
        }  # fmt: skip
        self._key, self._node, self._on_board = key, node, on_board
        self._max_frame_bytes = max_frame_bytes
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []  # in the order of the sockets
        self._udp: asyncio.DatagramTransport | None = None
        self._shut: socket.socket | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._unproven = _Unproven()
        self._refusals = _Allowance(MAX_REFUSALS, REFUSALS_PER_S)
        self.heard: set[str] = set()  # nodes that called
        self.counted: dict[str, list[bulk.Received]] = {}  # by peer: what it got of what we sent
        self.exclusive = asyncio.Lock()  # one transfer at a time is measured on this node

    async def bind(self, port: int) -> int:
        """Listen on `port` of all addresses (0: any); return it. Raises OSError."""
        sock = _listening(port)
        self._sockets.append(sock)
        self._accepting.append(asyncio.ensure_future(self._accept(sock)))
        return int(sock.getsockname()[1])

    def lend(self, port: int) -> socket.socket | None:
        """Return a second handle of a listening port, for the caller to close; None: not ours."""
        found = [sock for sock in self._sockets if sock.getsockname()[1] == port]
        return found[0].dup() if found else None

    def leave(self, port: int) -> None:
        """Accept no more calls on `port`; the one that has it on loan goes on, without a gap."""
        for sock, task in tuple(zip(self._sockets, self._accepting, strict=True)):
            if sock.getsockname()[1] == port:
                self._sockets.remove(sock)
                self._accepting.remove(task)
                # not before the loop has stopped to watch it
                task.add_done_callback(functools.partial(_close, sock))
                task.cancel()

    async def bind_spread(
        self, low: int, high: int, reserved: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, ...]:
        """Listen on ports spread evenly over low..high, as libraries will that ask for any.

        `reserved` are ports (first, last) that the kernel does not hand out.
        """
        found: list[int] = []
        num = max(doors.LEAST_DIALS, min(doors.most_ports(), (high - low + 1) // _SHARE))
        for part in doors.spread(low, high, num, random.random()):
            places = [part[0], *random.sample(part, min(_PLACES, len(part)))]
            for port in places:
                if any(first <= port <= last for first, last in reserved):
                    continue
                with contextlib.suppress(OSError):
                    found.append(await self.bind(port))
                    break
        return tuple(found)

    def bind_shut(self) -> int:
        """Hold a port on which no process listens; return it, or 0 where none can be had."""
        with contextlib.suppress(OSError):
            self._shut = _bound(socket.SOCK_STREAM, 0)
            return int(self._shut.getsockname()[1])
        return 0

    async def bind_udp(self) -> int:
        """Acknowledge MTU probes on a random UDP port; return it. Raises OSError."""
        sock = _bound(socket.SOCK_DGRAM, 0)
        loop = asyncio.get_running_loop()
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: Acknowledger(self._key), sock=sock
        )
        return int(sock.getsockname()[1])

    async def close(self) -> None:
        """Close every port and every call."""
        for task in (*self._accepting, *self._open):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._open, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        if self._udp is not None:
            self._udp.abort()
        if self._shut is not None:
            self._shut.close()
        await asyncio.sleep(0)  # for the loop to close what was aborted

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                call, address = await loop.sock_accept(sock)
            except OSError:
                await asyncio.sleep(_NO_FILES_PAUSE_S)
                continue
            task = asyncio.ensure_future(self._serve(call, plain(address[0])))
            self._unproven.add(task, plain(address[0]))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            task.add_done_callback(self._unproven.discard)

    async def _serve(self, sock: socket.socket, seen: str) -> None:
        """Hear who calls, and answer; the caller who went away or is none of ours gets a close."""
        link: wire.Link | None = None
        try:
            sock.setblocking(False)
            met = await self._meet(sock, seen)
            if met is not None:
                link, said, is_busy = met
                await self._answer(link, said, is_busy)
        except (OSError, EOFError, ValueError, wire.StrangerError, asyncio.CancelledError):
            pass
        finally:
            if link is not None:
                await hang_up(link.writer)
            sock.close()

    async def _meet(
        self, sock: socket.socket, seen: str
    ) -> tuple[wire.Link, wire.Hello, bool] | None:
        """Have the caller prove itself; None: it wanted another node."""
        loop = asyncio.get_running_loop()
        try:
            line = await _line(sock)
            speaker, said = wire.Speaker.called(self._keys, self._node, line)
        except wire.StrangerError as error:
            if error.why != "not-us" and self._refusals.spend():
                await loop.sock_sendall(sock, wire.refusal(error.why))
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_transfer = said.op in ("send", "fetch")
        is_busy = is_transfer and self.exclusive.locked()
        await loop.sock_sendall(sock, speaker.say_challenge(seen, is_busy))
        if said.by == "agent" and said.run != wire.short(self._key.run_id):
            return None
        if said.to and said.to != self._node:
            return None
        if said.by == "server" and said.op != "hello":
            return None
        speaker.hear_confirm(await _line(sock))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        limit_bytes = self._max_frame_bytes if said.op == "board" else wire.PATH_FRAME_BYTES
        link = speaker.link(reader, writer, is_caller=False, limit_bytes=limit_bytes)
        link.accept()
        return link, said, is_busy

    async def _answer(self, link: wire.Link, said: wire.Hello, is_busy: bool) -> None:
        if len(self._open) - len(self._unproven) > MAX_CALLS:
            return
        self._unproven.discard(asyncio.current_task())
        if said.by == "agent":
            self.heard.add(said.node)
        if said.op == "path":
            await answer_path(link)
        elif said.op == "board":
            await self._on_board(said.node, link)
        elif said.op != "hello" and not is_busy:
            async with self.exclusive:
                await self._transfer(said, link)
        await link.drain()

    async def _transfer(self, said: wire.Hello, link: wire.Link) -> None:
        if said.op == "send":
            await bulk.receive(link)
        else:
            sent = await bulk.send(link)
            self.counted.setdefault(said.node, []).append(sent)


def _close(sock: socket.socket, _task: asyncio.Task[None]) -> None:
    sock.close()


class _Unproven:
    """Calls of those who have not proven themselves, the oldest first."""

    def __init__(self) -> None:
        self._addresses: dict[object, str] = {}  # by task
        self._of_one: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, task: asyncio.Task[None], address: str) -> None:
        """Take a call; where there are too many, the oldest of who has most is given up."""
        address = _neighbourhood(address)
        self._addresses[task] = address
        self._of_one[address] += 1
        most, num = self._of_one.most_common(1)[0]
        if num > MAX_UNPROVEN_OF_ONE or len(self) > MAX_UNPROVEN:
            self._give_up(next(t for t, a in self._addresses.items() if a == most))

    def discard(self, task: object) -> None:
        """Forget a call that ended or was proven."""
        address = self._addresses.pop(task, None)
        if address is not None:
            self._of_one[address] -= 1
            if not self._of_one[address]:
                del self._of_one[address]

    def _give_up(self, task: object) -> None:
        self.discard(task)
        if isinstance(task, asyncio.Task):
            task.cancel()


class _Allowance:
    """So many at once, and so many a second afterwards."""

    def __init__(self, size: int, per_s: float) -> None:
        self._size, self._per_s = size, per_s
        self._left, self._at = float(size), time.monotonic()

    def spend(self) -> bool:
        """Return whether one more is allowed, and count it."""
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _neighbourhood(address: str) -> str:
    """Return what one stranger has in hand: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((address, 64), strict=False))


async def _line(sock: socket.socket) -> bytes:
    """Return one line, after which the caller waits. Raises EOFError, ValueError, OSError."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(HELLO_LIMIT_S):
        while not data.endswith(b"\n"):
            some = await loop.sock_recv(sock, wire.MAX_LINE_BYTES)
            if not some:
                raise EOFError("the caller went away")
            data += some
            if len(data) > wire.MAX_LINE_BYTES:
                raise ValueError("a line without end")
    return data


async def answer_path(link: wire.Link) -> None:
    """Answer what `path.py` asks: `P` and `L` are echoed, `C` gets our clock twice."""
    while True:
        try:
            data = await link.read()
        except EOFError:
            return
        if data[:1] == b"C":
            received_s = time.time()
            data = struct.pack("!cdd", b"C", received_s, time.time())
        link.write(data)
        await link.drain()


def _listening(port: int) -> socket.socket:
    sock = _bound(socket.SOCK_STREAM, port)
    sock.listen(_BACKLOG)
    return sock


def _bound(kind: socket.SocketKind, port: int) -> socket.socket:
    """Return a socket on all addresses of both families, or of IPv4 where there is no IPv6."""
    try:
        sock = socket.socket(socket.AF_INET6, kind)
    except OSError:
        sock = socket.socket(socket.AF_INET, kind)
    try:
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no holder
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
