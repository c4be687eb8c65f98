"""A stranger on the network of a preflight. It knows everything but the secret.

    python attacker.py ATTACK FILE ADDRESS ...

Attacks until it is killed, and writes to FILE what it got: one JSON object a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shutil
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.key import RunKey
from rankscope.preflight.model import Facts, NodeReport
from rankscope.preflight.probe import wire
from rankscope.preflight.probe.dial import Caller, dial
from rankscope.preflight.probe.mesh import Gossip

PORT, PAUSE_S, ANSWER_S = 29500, 0.1, 1.0
GUESSES = ("", "secret", "preflight", "rankscope preflight preflight ")
BAD = "node1\n\x1b[2J\x1b]0;taken\x07\u202e$(touch /tmp/taken)"
FORGED = NodeReport(
    node="node1", version=1 << 30, stage="done", started_unix_s=time.time(),
    facts=Facts(launch=LaunchFacts(master_addr=BAD)),
)  # fmt: skip


class Stranger:
    """One attack on some addresses."""

    def __init__(self, kept: Path, addresses: list[str]) -> None:
        self.kept, self.addresses = kept, addresses

    def note(self, what: str, got: bytes | str) -> None:
        """Keep what an attempt brought."""
        text = got.decode("latin-1") if isinstance(got, bytes) else got
        with self.kept.open("a") as file:
            file.write(json.dumps({"what": what, "got": text[:4000]}) + "\n")

    async def say(self, what: str, address: str, *lines: bytes) -> None:
        """Send lines, each after an answer or a second, and note all that came back."""
        got = b""
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(address, PORT), ANSWER_S
            )
            try:
                for line in lines:
                    writer.write(line)
                    with contextlib.suppress(TimeoutError):
                        got += await asyncio.wait_for(reader.read(65536), ANSWER_S)
            finally:
                writer.transport.abort()
        self.note(what, got)

    async def guessed(self, what: str, address: str, frames: tuple[bytes, ...] = ()) -> None:
        """Speak as an agent does, with each secret that could be the default."""
        for guess in GUESSES:
            caller = Caller(RunKey.of(guess, "preflight"), "node1")
            found, call = await dial(caller, address, PORT, "", "board")
            self.note(what, "" if call is None else f"accepted: {found}")
            if call is not None:
                for frame in frames:
                    call.link.write(frame)
                with contextlib.suppress(OSError, EOFError, ValueError):
                    self.note(what, await call.link.read())
                await call.close()

    async def read(self, address: str) -> None:
        """Ask for the reports."""
        await self.guessed("read", address)
        await self.say("read", address, b"GET / HTTP/1.1\r\n\r\n")

    async def replace(self, address: str) -> None:
        """Say something else for node1."""
        frame = msgspec.json.encode(Gossip({}, [FORGED]))
        await self.guessed("replace", address, (frame,))

    async def forge_node(self, address: str) -> None:
        """Be a node that there is not, and one that there is."""
        for node in ("node3", "node2"):
            speaker = wire.Speaker(RunKey.of(secrets.token_hex(16), "preflight"), node)
            hello, confirm = speaker.say_hello("", "board"), speaker.say_confirm()
            await self.say("forged node", address, hello, confirm)

    async def replay(self, address: str) -> None:
        """Say again what agents said to each other, as it was recorded on one of the hosts."""
        calls = [json.loads(line) for line in _lines(self.kept.with_suffix(".heard"))]
        for lines in calls[:8]:
            await self.say("replay", address, *(line.encode("latin-1") for line in lines))

    async def wrong_proof(self, address: str) -> None:
        """Say a hello that is right but for its proof, and the frames behind it at once."""
        speaker = wire.Speaker(RunKey.of("guess", "preflight"), "node1")
        said = json.loads(speaker.say_hello("", "board"))
        for proof in ("", "0" * 64, said["proof"], "\u00e9" * 64):
            line = json.dumps({**said, "proof": proof}).encode() + b"\n"
            await self.say("wrong proof", address, line + line, b"{}\n")

    async def downgrade(self, address: str) -> None:
        """Speak as older versions did, and as one that is to come."""
        for version in (0, 1, 3, -1, 1 << 70):
            said = {"rankscope_preflight": version, "node": "node1", "to": "", "op": "board",
                    "nonce": "0" * 16, "proof": "0" * 32}  # fmt: skip
            await self.say("downgrade", address, json.dumps(said).encode() + b"\n")

    async def newline(self, address: str) -> None:
        """Have a name that ends the line it stands in."""
        await self._named(address, "node1\nFAIL taken\n")

    async def escapes(self, address: str) -> None:
        """Have a name that clears the screen."""
        await self._named(address, BAD)

    async def _named(self, address: str, name: str) -> None:
        speaker = wire.Speaker(RunKey.of("", "preflight"), name)
        await self.say("named", address, speaker.say_hello(name, "hello"))

    async def oversized(self, address: str) -> None:
        """Send more than anybody keeps."""
        await self.say("oversized", address, b"x" * (4 << 20))
        await self.say("oversized", address, b'{"a":' * 100_000 + b"\n")
        await self.say("oversized", address, struct.pack("!I", 1 << 31) + b"y" * 65536)

    async def slow(self, address: str) -> None:
        """Say a hello so slowly that it never ends."""
        line = wire.Speaker(RunKey.of("", "preflight"), "node1").say_hello("", "hello")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(address, PORT)
            for one in line:
                writer.write(bytes([one]))
                await asyncio.sleep(0.2)
                if reader.at_eof() or writer.is_closing():
                    break
            writer.transport.abort()
        self.note("slow", "" if time.monotonic() - began < 5 else "held for more than 5 s")


async def idle(stranger: Stranger, num: int = 1000) -> None:
    """Hold 1,000 connections to the first host, and open new ones for those that are closed."""
    held: list[socket.socket] = []
    loop, first = asyncio.get_running_loop(), stranger.addresses[0]
    while True:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, (first, PORT)), ANSWER_S)
            held.append(sock)
        except (OSError, TimeoutError):
            sock.close()
            await asyncio.sleep(PAUSE_S)
        if len(held) >= num:
            stranger.note("idle", "")
            held.pop(0).close()
            await asyncio.sleep(0.01)


async def share(stranger: Stranger) -> None:
    """Write reports into the directory that all nodes share, and old ones again."""
    directory = Path(stranger.addresses[0]) / "rankscope-preflight-preflight"
    kept = stranger.kept.with_suffix(".old")
    kept.mkdir(exist_ok=True)
    while True:
        await asyncio.sleep(PAUSE_S)
        with contextlib.suppress(OSError):
            for path in list(directory.glob("node*.json"))[:3]:
                old = kept / path.name
                if not old.exists():
                    shutil.copy(path, old)
            for node in ("node7", BAD):
                data = msgspec.json.encode(msgspec.structs.replace(FORGED, node=node))
                (directory / f"{quote(node, safe='')}.json").write_bytes(data + b"\n" + b"0" * 64)
            for old in kept.iterdir():
                (directory / "draft").write_bytes(old.read_bytes())
                (directory / "draft").replace(directory / f"{old.stem}8.json")
            stranger.note("share", "")


def answer(stranger: Stranger) -> None:
    """Answer on the port of an agent, with words that act."""
    speaker = wire.Speaker(RunKey.of("guess", "preflight"), "node3")
    speaker.say_hello("", "hello")
    challenge = speaker.say_challenge(BAD, is_busy=False)  # with a proof of another secret
    words = (
        challenge,
        BAD.encode() + b"\r\n",
        b"\x1b[2J" * 40 + b"\n",
        b"HTTP/1.1 200\n\x1b]0;x\x07\n",
        b"",
    )
    with socket.create_server(("", PORT)) as server:
        for said in itertools.cycle(words):
            call, _ = server.accept()
            with call, contextlib.suppress(OSError):
                call.settimeout(2)
                call.recv(4096)
                call.sendall(said)
                stranger.note("answer", "")


def record(kept: Path) -> None:
    """Record on a host what its callers say to its agent, call by call."""
    calls: dict[bytes, list[str]] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0800)) as raw:
        while True:
            packet = raw.recv(65536)[14:]
            start = (packet[0] & 15) * 4
            segment = packet[start : int.from_bytes(packet[2:4], "big")]
            payload = segment[(segment[12] >> 4) * 4 :] if packet[9] == 6 else b""
            if not payload or int.from_bytes(segment[2:4], "big") != PORT:
                continue
            call = calls.setdefault(packet[12:16] + segment[:2], [])
            call.append(payload.decode("latin-1"))
            if len(call) == 3:  # hello, confirm, the first frame
                with kept.with_suffix(".heard").open("a") as file:
                    file.write(json.dumps(call) + "\n")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def attack(stranger: Stranger, name: str) -> None:
    """Attack all addresses again and again."""
    if name in ("idle", "share"):
        await {"idle": idle, "share": share}[name](stranger)
    each: Callable[[str], Awaitable[None]] = getattr(stranger, name)
    while True:
        for address in stranger.addresses:
            await each(address)
        await asyncio.sleep(PAUSE_S)


def main() -> None:
    """Do what was asked on the command line."""
    name, kept, addresses = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    stranger = Stranger(kept, addresses)
    if name == "record":
        record(kept)
    elif name == "answer":
        answer(stranger)
    else:
        asyncio.run(attack(stranger, name))


if __name__ == "__main__":
    main()
