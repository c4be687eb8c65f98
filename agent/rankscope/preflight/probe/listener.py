"""Answers the peers of this run on MASTER_PORT and on three random ports, while preflight runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import cast

from rankscope.preflight.probe import bulk, wire
from rankscope.preflight.probe.dial import plain

MAX_CALLS = 512  # open at a time; a stranger cannot hold more
HELLO_LIMIT_S = 3.0
NUM_EPHEMERAL = 3
_BACKLOG = 1024
_PLACES = 8  # tries to find a free port in each third of the range
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Listener:
    """The listening side of one node. `on_board` gets the links that carry reports."""

    def __init__(
        self, token: str, node: str, on_board: Callable[[str, Stream], Awaitable[None]]
    ) -> None:
        self._token, self._node, self._on_board = token, node, on_board
        self._servers: list[asyncio.Server] = []
        self._udp: asyncio.DatagramTransport | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.heard: set[str] = set()  # nodes that called
        self.counted: dict[str, list[bulk.Received]] = {}  # by peer: what it got of what we sent
        self.exclusive = asyncio.Lock()  # one transfer at a time is measured on this node

    async def bind(self, port: int) -> int:
        """Listen on `port` of all addresses (0: any); return it. Raises OSError."""
        sock = _listening(port)
        self._servers.append(await asyncio.start_server(self._accept, sock=sock, limit=1 << 20))
        return int(sock.getsockname()[1])

    async def bind_spread(self, low: int, high: int) -> tuple[int, ...]:
        """Listen on three ports spread over low..high, as libraries will that ask for any."""
        found: list[int] = []
        third = max(1, (high - low + 1) // NUM_EPHEMERAL)
        for part in range(NUM_EPHEMERAL):
            for _ in range(_PLACES):
                port = low + part * third + random.randrange(third)
                with contextlib.suppress(OSError):
                    found.append(await self.bind(port))
                    break
        return tuple(found)

    async def bind_udp(self) -> int:
        """Acknowledge MTU probes on a random UDP port; return it. Raises OSError."""
        sock = _bound(socket.SOCK_DGRAM, 0)
        loop = asyncio.get_running_loop()
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: _Acknowledger(self._token), sock=sock
        )
        return int(sock.getsockname()[1])

    async def close(self) -> None:
        """Close every port and every call."""
        for server in self._servers:
            server.close()
        if self._udp is not None:
            self._udp.abort()
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await asyncio.sleep(0)  # for the loop to close what was aborted

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._open) >= MAX_CALLS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, ValueError, TimeoutError, wire.StrangerError):
            pass  # the caller went away or is none of ours: it gets a close
        except asyncio.CancelledError:
            pass  # the server's own callback would log it
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_LIMIT_S):
            said = wire.read_hello(self._token, await reader.readline())
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seen = plain(writer.get_extra_info("peername")[0])
        is_transfer = said.op in ("send", "fetch")
        is_busy = is_transfer and self.exclusive.locked()
        writer.write(wire.answer(self._token, said, self._node, seen, is_busy))
        if said.to and said.to != self._node:
            await writer.drain()
            return
        self.heard.add(said.node)
        if said.op == "path":
            await answer_path(reader, writer)
        elif said.op == "board":
            await self._on_board(said.node, (reader, writer))
        elif is_transfer and not is_busy:
            async with self.exclusive:
                await self._transfer(said, reader, writer)
        await writer.drain()

    async def _transfer(
        self, said: wire.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if said.op == "send":
            await bulk.receive(reader, writer)
        else:
            sent = await bulk.send(reader, writer)
            self.counted.setdefault(said.node, []).append(sent)


async def answer_path(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer what `path.py` asks: `P` and `L` are echoed, `C` gets our clock twice."""
    while True:
        try:
            data = await wire.read_frame(reader)
        except EOFError:
            return
        if data[:1] == b"C":
            received_s = time.time()
            data = struct.pack("!cdd", b"C", received_s, time.time())
        writer.write(wire.frame(data))
        await writer.drain()


class _Acknowledger(asyncio.DatagramProtocol):
    """Answers a probe with its size; a datagram without the run's proof gets nothing."""

    def __init__(self, token: str) -> None:
        self._mark = datagram_mark(token)
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Acknowledge."""
        if data.startswith(self._mark) and self._transport is not None:
            self._transport.sendto(self._mark + struct.pack("!I", len(data)), addr)


def datagram_mark(token: str) -> bytes:
    """Return the first bytes of this run's datagrams."""
    return hashlib.sha256(f"udp|{token}".encode()).digest()[:16]


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
