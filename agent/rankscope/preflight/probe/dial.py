"""Connects to one address, and returns what answered or how the attempt ended.

The classes were measured in the laboratory on Linux 6.18: a reset and an ICMP port-unreachable come
as ECONNREFUSED within 2 ms, admin-prohibited as EHOSTUNREACH within 2 ms, an address that no host
on the link has as EHOSTUNREACH after 3.06 s (three unanswered ARP requests): the first call, and at
the same moment all that came later, so that the kernel's table of neighbours is read as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno as codes
import hashlib
import hmac
import json
import secrets
import socket
import time
from dataclasses import dataclass

from rankscope.preflight.facts import routes
from rankscope.preflight.facts.edges import Dial, DialClass
from rankscope.preflight.key import RunKey
from rankscope.preflight.probe import wire

ARP_GAVE_UP_MS = 1_000.0  # between the two kinds of EHOSTUNREACH: 1.5 ms and 3,060 ms
_BY_ERRNO: dict[int, DialClass] = {
    codes.ECONNREFUSED: "refused",
    codes.ECONNRESET: "refused",
    codes.ETIMEDOUT: "drop",
    codes.ENETUNREACH: "no-route",
    codes.EADDRNOTAVAIL: "no-local-port",
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


def class_of(errno: int | None, elapsed_ms: float, address: str) -> DialClass:
    """Return the same after a look at what this kernel knows of neighbours and of its ports."""
    outcome = classify(errno, elapsed_ms)
    if outcome == "prohibited" and routes.is_unanswered(address):
        return "no-arp"
    if outcome == "no-local-port" and ":" in address and _has_local_port():
        return "no-route"  # there is no address of ours to call from
    return outcome


def _has_local_port() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("", 0))
        except OSError:
            return False
    return True


LIMIT_S = 1.5  # one SYN and its first repetition after 1 s
# Of a dial that counts: three SYNs, after 0, 1 and 3 s, and the kernel gives up on an address that
# no host has after 3.06 s.
PROVEN_LIMIT_S = 3.5
# Reports and data must pass where large packets vanish: that is another finding. Every host takes
# packets of 576 bytes.
SMALL_SEGMENT_BYTES = 500
OLDER = "an older rankscope"
ANSWER_LIMIT_S = 4.0  # an agent on a busy machine takes its time


@dataclass(frozen=True)
class Caller:
    """Who we are to those we call."""

    key: RunKey
    node: str
    by: wire.By = "agent"
    max_frame_bytes: int = wire.MAX_FRAME_BYTES  # of a link that carries reports


@dataclass
class DialCall:
    """An open connection to a peer's agent, both sides proven."""

    dial: Dial
    sock: socket.socket
    link: wire.Link
    is_busy: bool = False

    async def close(self) -> None:
        """Close at once; what is still in a buffer is lost."""
        await hang_up(self.link.writer)


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
        outcome = class_of(number, elapsed_ms, address)
        return Dial(
            outcome=outcome, address=address, port=port, elapsed_ms=elapsed_ms, errno=name
        ), None
    local = plain(sock.getsockname()[0])
    greeting = await _Greeting(caller, sock).run(to, op)
    if greeting.errno in ("EOF", "ECONNRESET") and await _is_older(caller, address, port):
        greeting.outcome, greeting.banner, greeting.errno = "other-version", OLDER, ""
    base = Dial(
        outcome=greeting.outcome, address=address, port=port, local_address=local,
        elapsed_ms=(time.monotonic() - started) * 1e3, errno=greeting.errno,
        answered_by=greeting.answered_by, seen_address=greeting.seen, banner=greeting.banner,
    )  # fmt: skip
    if greeting.link is None:
        return base, None
    return base, DialCall(base, sock, greeting.link, greeting.is_busy)


async def _is_older(caller: Caller, address: str, port: int) -> bool:
    """Return whether a rankscope answers there that closes on the words of this version.

    It is asked in its own words, with what its agents showed where no secret was given.
    """
    run = f"rankscope preflight {caller.key.run_id} ".encode()
    token, nonce = hashlib.sha256(run).hexdigest()[:32], secrets.token_hex(8)
    said = f"{nonce}|{caller.node}>hello".encode()
    words = {
        "rankscope_preflight": 1, "node": caller.node, "to": "", "op": "hello", "nonce": nonce,
        "proof": hmac.new(token.encode(), said, hashlib.sha256).hexdigest()[:32],
    }  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(json.dumps(words).encode() + b"\n")
                return b'"rankscope_preflight":1,' in await reader.read(wire.MAX_LINE_BYTES)
            finally:
                await hang_up(writer)
    except (OSError, ValueError):
        return False


class _Greeting:
    """What happens after a connection was accepted: the proofs of both sides."""

    def __init__(self, caller: Caller, sock: socket.socket) -> None:
        self._caller, self._sock = caller, sock
        self.outcome: DialClass = "no-data"
        self.errno = self.answered_by = self.seen = self.banner = ""
        self.is_busy = False
        self.link: wire.Link | None = None
        self._heard = b""  # of a line that has not ended

    async def run(self, to: str, op: wire.Op) -> _Greeting:
        """Prove who we are and hear who answers; the socket is closed unless there is a link."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await self._prove(to, op)
        except wire.StrangerError as error:
            self.outcome, self.banner = error.why, str(error)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            self.errno = _name_of(error)
            if self._heard:  # a program that greets and waits
                self.outcome, self.banner = "not-us", wire.printable(self._heard)
        finally:
            if self.link is None:
                self._sock.close()
        return self

    async def _prove(self, to: str, op: wire.Op) -> None:
        caller, loop = self._caller, asyncio.get_running_loop()
        speaker = wire.Speaker(caller.key, caller.node)
        await loop.sock_sendall(self._sock, speaker.say_hello(to, op, caller.by))
        answer = speaker.hear_challenge(await self._line())
        self.answered_by, self.seen, self.is_busy = answer.node, answer.seen, answer.is_busy
        if caller.key.run_id and answer.run != wire.short(caller.key.run_id):
            self.outcome, self.banner = "other-run", answer.run
            return
        if to and answer.node != to:
            self.outcome = "wrong-host"
            return
        await loop.sock_sendall(self._sock, speaker.say_confirm())
        reader, writer = await asyncio.open_connection(sock=self._sock, limit=1 << 20)
        link = speaker.link(reader, writer, is_caller=True, limit_bytes=caller.max_frame_bytes)
        try:
            await link.accepted()
        except BaseException:
            await hang_up(writer)
            raise
        self.outcome, self.link = "ok", link

    async def _line(self) -> bytes:
        """Return the first line. Raises EOFError, OSError."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._heard and len(self._heard) <= wire.MAX_LINE_BYTES:
            some = await loop.sock_recv(self._sock, wire.MAX_LINE_BYTES)
            if not some and not self._heard:
                raise EOFError("closed")
            if not some:
                break
            self._heard += some
        line, self._heard = self._heard, b""
        return line


def _name_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "ETIMEDOUT"
    if isinstance(error, EOFError):
        return "EOF"
    number = getattr(error, "errno", None) or 0
    return codes.errorcode.get(number, type(error).__name__)


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
