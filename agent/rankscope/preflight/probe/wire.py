"""The words between two agents: who calls, who answers, and the frames that follow.

A call opens with one JSON line and is answered by one; both carry a proof that the speaker knows
the run's token. A stranger gets nothing but a close.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

Op = Literal["hello", "path", "send", "fetch", "board"]
MAX_LINE_BYTES = 2048
MAX_FRAME_BYTES = 32 << 20  # the reports of 1,000 nodes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller says first."""

    rankscope_preflight: int  # version of these words
    node: str
    to: str  # the node that the caller means to reach; empty: any that answers
    op: Op
    nonce: str
    proof: str


class DialAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the called says first."""

    rankscope_preflight: int
    node: str
    seen: str  # the caller's address, as it arrived here
    proof: str
    is_busy: bool = False  # another transfer is being measured: call again


class StrangerError(Exception):
    """The other side is no agent of this run; the message holds what it said."""


def hello(token: str, node: str, to: str, op: Op) -> tuple[bytes, str]:
    """Return the line that opens a call, and its nonce."""
    nonce = secrets.token_hex(8)
    proof = _proof(token, nonce, f"{node}>{op}")
    said = Hello(rankscope_preflight=1, node=node, to=to, op=op, nonce=nonce, proof=proof)
    return msgspec.json.encode(said) + b"\n", nonce


def read_hello(token: str, line: bytes) -> Hello:
    """Return who calls. Raises StrangerError."""
    try:
        said = msgspec.json.decode(line, type=Hello)
    except msgspec.MsgspecError as error:
        raise StrangerError(str(error)) from error
    if not hmac.compare_digest(said.proof, _proof(token, said.nonce, f"{said.node}>{said.op}")):
        raise StrangerError("another run's token")
    return said


def answer(token: str, said: Hello, node: str, seen: str, is_busy: bool = False) -> bytes:
    """Return the line that answers `said`."""
    proof = _proof(token, said.nonce, f"<{node}")
    answer = DialAnswer(rankscope_preflight=1, node=node, seen=seen, proof=proof, is_busy=is_busy)
    return msgspec.json.encode(answer) + b"\n"


def read_answer(token: str, nonce: str, line: bytes) -> DialAnswer:
    """Return who answered. Raises StrangerError."""
    try:
        answer = msgspec.json.decode(line, type=DialAnswer)
    except msgspec.MsgspecError as error:
        raise StrangerError(printable(line)) from error
    if not hmac.compare_digest(answer.proof, _proof(token, nonce, f"<{answer.node}")):
        raise StrangerError("an agent of another run")
    return answer


def printable(data: bytes) -> str:
    """Return the first bytes of what a stranger said, fit for a screen."""
    text = data[:60].decode("ascii", "replace")
    return "".join(c if c.isprintable() else "." for c in text).strip(".")


def _proof(token: str, nonce: str, words: str) -> str:
    key, message = token.encode(), f"{nonce}|{words}".encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()[:32]


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one frame. Raises EOFError at the end, ValueError where it is too large."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise EOFError("the peer closed the link") from error


def frame(data: bytes) -> bytes:
    """Return `data` with its size in front."""
    return len(data).to_bytes(4, "big") + data
