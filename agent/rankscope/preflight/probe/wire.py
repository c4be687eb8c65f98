"""The words between two agents: who calls, who answers, and the frames that follow.

    caller   hello      who I am, whom I want, my nonce, a proof
    called   challenge  who I am, where I see you, my nonce, a proof over all of this
    caller   confirm    a proof over all of this
    called   accept     the first frame

Proofs are HMAC-SHA256 with a key that only agents with the run's secret have; each is made for its
place, so that none can be sent back or be used in another call. A recorded hello gets a challenge
that its sender cannot answer. After `accept` data has passed in both directions. A stranger gets a
close; one who says a hello that cannot be verified gets the reason, and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rankscope.preflight.key import RunKey, packed, tag

VERSION = 2
Op = Literal["hello", "path", "send", "fetch", "board"]
By = Literal["agent", "server"]
Why = Literal["not-us", "other-secret", "other-version"]
MAX_LINE_BYTES = 2048
MAX_FRAME_BYTES = 32 << 20  # of nodes whose number is not known
PATH_FRAME_BYTES = 1 << 20  # of a link that carries no reports
TAG_BYTES = 16
_BASE_BYTES, _NODE_BYTES = 4 << 20, 256 << 10  # of a frame that holds the reports of n nodes
_MOST_RUN = 200  # characters
_ACCEPT = b"accept"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller says first."""

    rankscope_preflight: int  # version of these words
    node: str
    to: str  # the node that the caller means to reach; empty: any that answers
    op: Op
    by: By  # a server that coordinates the run may knock, and no more
    run: str
    nonce: str
    proof: str


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """What the called says first."""

    rankscope_preflight: int
    node: str
    run: str
    seen: str  # the caller's address, as it arrived here
    is_busy: bool  # another transfer is being measured: call again
    nonce: str
    proof: str


class Confirm(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller says to a challenge."""

    proof: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """All that one learns who cannot prove that it belongs to us."""

    rankscope_preflight: int
    refused: Literal["secret", "version"]


class StrangerError(Exception):
    """The other side is no agent of this run; the message holds what it said."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why: Why = why


class Speaker:
    """One side of a call: what was said so far, and the keys that follow from it."""

    def __init__(self, key: RunKey, node: str) -> None:
        self._key, self._node = key, node
        self._said = b""  # hello and challenge
        self.hello: Hello | None = None
        self.challenge: Challenge | None = None

    def say_hello(self, to: str, op: Op, by: By = "agent") -> bytes:
        """Return the line that opens a call."""
        words = Hello(
            rankscope_preflight=VERSION, node=self._node, to=to, op=op, by=by,
            run=short(self._key.run_id), nonce=secrets.token_hex(16), proof="",
        )  # fmt: skip
        self.hello = self._proven(words, "hello")
        return msgspec.json.encode(self.hello) + b"\n"

    @classmethod
    def called(cls, keys: Mapping[By, RunKey], node: str, line: bytes) -> tuple[Speaker, Hello]:
        """Return the called side, and who calls. Raises StrangerError."""
        _check_version(line)
        one = cls(keys[_decoded(line, _Kind).by], node)
        one.hello = one._heard(line, Hello, "hello")
        return one, one.hello

    def say_challenge(self, seen: str, is_busy: bool) -> bytes:
        """Return the line that answers a hello."""
        words = Challenge(
            rankscope_preflight=VERSION, node=self._node, run=short(self._key.run_id), seen=seen,
            is_busy=is_busy, nonce=secrets.token_hex(16), proof="",
        )  # fmt: skip
        self.challenge = self._proven(words, "challenge")
        return msgspec.json.encode(self.challenge) + b"\n"

    def hear_challenge(self, line: bytes) -> Challenge:
        """Return who answered. Raises StrangerError."""
        _check_refusal(line)
        _check_version(line)
        self.challenge = self._heard(line, Challenge, "challenge", "not-us")
        return self.challenge

    def say_confirm(self) -> bytes:
        """Return the line that ends the proofs."""
        return msgspec.json.encode(Confirm(proof=self._proof("confirm"))) + b"\n"

    def hear_confirm(self, line: bytes) -> None:
        """Check that the caller knows the secret now, and not only once. Raises StrangerError."""
        said = _decoded(line, Confirm)
        if not hmac.compare_digest(said.proof.encode(), self._proof("confirm").encode()):
            raise StrangerError("other-secret", "a wrong proof")

    def link(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_caller: bool,
        limit_bytes: int = MAX_FRAME_BYTES,
    ) -> Link:  # fmt: skip
        """Return the frames that follow."""
        there, back = self._frames("to the called"), self._frames("to the caller")
        keys = (there, back) if is_caller else (back, there)
        return Link(reader, writer, keys, limit_bytes)

    def _frames(self, direction: str) -> bytes:
        return tag(self._key.secret, "frames", direction, self._said)

    def _proof(self, place: str, words: bytes = b"") -> str:
        return tag(self._key.secret, place, self._said, words).hex()

    def _proven(self, words: Any, place: str) -> Any:
        proof = self._proof(place, _bare(words))
        words = msgspec.structs.replace(words, proof=proof)
        self._said += packed(place, msgspec.json.encode(words))
        return words

    def _heard(self, line: bytes, kind: type[Any], place: str, why: Why = "other-secret") -> Any:
        words = _decoded(line, kind)
        proof = self._proof(place, _bare(words))
        if not hmac.compare_digest(words.proof.encode(), proof.encode()):
            raise StrangerError(why, "a wrong proof")
        self._said += packed(place, msgspec.json.encode(words))
        return words


class Link:
    """A proven connection: frames in both directions, each with its number and a tag.

    A frame that was changed, repeated, left out, or sent back ends the link.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        keys: tuple[bytes, bytes], limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:  # fmt: skip
        self.reader, self.writer = reader, writer
        self._sending, self._receiving = keys
        self._limit_bytes = limit_bytes
        self._num_sent = self._num_received = 0

    def write(self, data: bytes) -> None:
        """Send a frame."""
        size = len(data).to_bytes(4, "big")
        mark = _mark(self._sending, self._num_sent, data)
        self._num_sent += 1
        self.writer.write(b"".join((size, mark, data)))

    async def drain(self) -> None:
        """Wait until the kernel takes more. Raises OSError."""
        await self.writer.drain()

    async def read(self) -> bytes:
        """Read a frame. Raises EOFError at the end, ValueError where it is too large or forged."""
        try:
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            if size > self._limit_bytes:
                raise ValueError(f"a frame of {size} bytes, at most {self._limit_bytes} are taken")
            mark = await self.reader.readexactly(TAG_BYTES)
            data = await self.reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise EOFError("the peer closed the link") from error
        if not hmac.compare_digest(mark, _mark(self._receiving, self._num_received, data)):
            raise ValueError("a frame that the peer did not send")
        self._num_received += 1
        return data

    def accept(self) -> None:
        """Say that the proofs were right."""
        self.write(_ACCEPT)

    async def accepted(self) -> None:
        """Wait for that. Raises EOFError, OSError, ValueError."""
        if await self.read() != _ACCEPT:
            raise ValueError("not accepted")


def refusal(why: Why) -> bytes:
    """Return the line for one whose hello could not be verified."""
    word: Literal["secret", "version"] = "version" if why == "other-version" else "secret"
    return msgspec.json.encode(Refusal(rankscope_preflight=VERSION, refused=word)) + b"\n"


def frame_limit(num_nodes: int) -> int:
    """Return how many bytes the reports of so many nodes take at most; 0: not known how many."""
    return _BASE_BYTES + num_nodes * _NODE_BYTES if num_nodes else MAX_FRAME_BYTES


def printable(data: bytes) -> str:
    """Return the first bytes of what a stranger said, fit for a screen."""
    text = data[:60].decode("ascii", "replace")
    return "".join(c if c.isascii() and c.isprintable() else "." for c in text).strip(".")


def short(run_id: str) -> str:
    """Return a run's name as it is written in a line."""
    return run_id if len(run_id) <= _MOST_RUN else hashlib.sha256(run_id.encode()).hexdigest()


class _Version(msgspec.Struct, frozen=True):
    rankscope_preflight: int


class _Kind(msgspec.Struct, frozen=True):
    by: By


def _check_version(line: bytes) -> None:
    version = _decoded(line, _Version).rankscope_preflight
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise StrangerError("other-version", f"{age} rankscope (its words are version {version})")


def _check_refusal(line: bytes) -> None:
    try:
        said = msgspec.json.decode(line, type=Refusal)
    except msgspec.MsgspecError:
        return
    if said.refused == "secret":
        raise StrangerError("other-secret", "an agent with another secret")
    _check_version(line)
    raise StrangerError("other-version", "a rankscope that takes us for another version")


def _decoded(line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StrangerError("not-us", printable(line)) from error


def _bare(words: Any) -> bytes:
    """Return what a proof is made over: every field but the proof itself."""
    return msgspec.json.encode(msgspec.structs.replace(words, proof=""))


def _mark(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + data, "sha256")[:TAG_BYTES]
