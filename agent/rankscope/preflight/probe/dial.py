"""Connects to one address, and returns what answered or how the attempt ended.

The classes were measured in the laboratory on Linux 6.18: a reset and an ICMP port-unreachable come
as ECONNREFUSED within 2 ms, admin-prohibited as EHOSTUNREACH within 2 ms, an address that no host
on the link has as EHOSTUNREACH after 3.06 s (three unanswered ARP requests).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno as codes
import socket
import time
from dataclasses import dataclass

import msgspec

from rankscope.preflight.facts.edges import Dial, DialClass
from rankscope.preflight.probe import wire

ARP_GAVE_UP_MS = 1_000.0  # between the two kinds of EHOSTUNREACH: 1.5 ms and 3,060 ms
_BY_ERRNO: dict[int, DialClass] = {
    codes.ECONNREFUSED: "refused",
    codes.ECONNRESET: "refused",
    codes.ETIMEDOUT: "drop",
    codes.ENETUNREACH: "no-route",
    codes.EADDRNOTAVAIL: "no-route",
    codes.EAFNOSUPPORT: "no-route",
    codes.EINVAL: "no-route",
    codes.EPERM: "local-firewall",
    codes.EACCES: "local-firewall",
}


def classify(errno: int | None, elapsed_ms: float) -> DialClass:
    """Return the class of a dial that failed; `errno` None: it was cut at its limit."""
    if errno is None:
        return "drop"
    if errno in (codes.EHOSTUNREACH, codes.EHOSTDOWN):
        return "no-arp" if elapsed_ms > ARP_GAVE_UP_MS else "prohibited"
    return _BY_ERRNO.get(errno, "error")


LIMIT_S = 1.5  # one SYN and its first repetition after 1 s
# Of a dial that counts: three SYNs, after 0, 1 and 3 s, and the kernel gives up on an address that
# no host has after 3.06 s.
PROVEN_LIMIT_S = 3.5
ANSWER_LIMIT_S = 4.0  # an agent on a busy machine takes its time


@dataclass(frozen=True)
class Caller:
    """Who we are to those we call."""

    token: str
    node: str


@dataclass
class DialCall:
    """An open connection to a peer's agent."""

    dial: Dial
    sock: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_busy: bool = False

    async def close(self) -> None:
        """Close at once; what is still in a buffer is lost."""
        await hang_up(self.writer)


async def dial(
    caller: Caller, address: str, port: int, to: str, op: wire.Op = "hello",
    limit_s: float = LIMIT_S, max_segment_bytes: int = 0,
) -> tuple[Dial, DialCall | None]:  # fmt: skip
    """Call `to` at `address`; return how it went and, if its agent answered, the connection."""
    started = time.monotonic()
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setblocking(False)
    try:
        if max_segment_bytes:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, max_segment_bytes)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(limit_s):  # wait_for of Python 3.11 may swallow a cancellation
            await loop.sock_connect(sock, (address, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, TimeoutError) as error:
        sock.close()
        elapsed_ms = (time.monotonic() - started) * 1e3
        number = getattr(error, "errno", None)
        name = codes.errorcode.get(number, str(number)) if number else "ETIMEDOUT"
        outcome = classify(number, elapsed_ms)
        return Dial(
            outcome=outcome, address=address, port=port, elapsed_ms=elapsed_ms, errno=name
        ), None
    return await _greet(caller, sock, (address, port), to, op, started)


async def _greet(
    caller: Caller, sock: socket.socket, where: tuple[str, int], to: str, op: wire.Op,
    started: float,
) -> tuple[Dial, DialCall | None]:  # fmt: skip
    local = plain(sock.getsockname()[0])
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    line, nonce = wire.hello(caller.token, caller.node, to, op)
    answer, banner, how = None, "", ""
    outcome: DialClass = "no-data"
    try:
        writer.write(line)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            said = await reader.readline()
        if said:
            outcome = "not-us"
            answer = wire.read_answer(caller.token, nonce, said)
        how = "" if said else "EOF"
    except wire.StrangerError as error:
        banner = str(error)
    except ValueError as error:  # a line without end
        outcome, banner = "not-us", f"no answer ({type(error).__name__})"
    except TimeoutError:
        how = "ETIMEDOUT"
    except OSError as error:
        how = codes.errorcode.get(error.errno or 0, type(error).__name__)
    base = Dial(
        outcome="ok", address=where[0], port=where[1], local_address=local,
        elapsed_ms=(time.monotonic() - started) * 1e3,
    )  # fmt: skip
    if answer is None:
        await hang_up(writer)
        return _changed(base, outcome=outcome, banner=banner, errno=how), None
    base = _changed(base, answered_by=answer.node, seen_address=answer.seen)
    if to and answer.node != to:
        await hang_up(writer)
        return _changed(base, outcome="wrong-host"), None
    return base, DialCall(base, sock, reader, writer, answer.is_busy)


async def knock(caller: Caller, address: str, port: int, to: str) -> Dial:
    """Dial, say hello and hang up."""
    found, call = await dial(caller, address, port, to, limit_s=PROVEN_LIMIT_S)
    if call is not None:
        await call.close()
    return found


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection now; what is still in a buffer is lost."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def plain(address: str) -> str:
    """Return an address without IPv4-in-IPv6 notation and without a zone."""
    return address.removeprefix("::ffff:").partition("%")[0]


def _changed(dial: Dial, **fields: str) -> Dial:
    return msgspec.structs.replace(dial, **fields)
