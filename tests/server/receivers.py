"""What alerts are sent to: real HTTP and SMTP servers that note what came."""

from __future__ import annotations

import asyncio
import contextlib
import email
import email.policy
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WAIT_SECONDS = 30.0


def wait_for(is_so: Callable[[], Any], what: str) -> Any:
    """Wait until something is so; return it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = is_so()
        if found:
            return found
        assert time.monotonic() < deadline, f"in {WAIT_SECONDS:.0f} s not seen: {what}"
        time.sleep(0.02)


@dataclass(frozen=True)
class Request:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """An HTTP server. `status` answers each request, or what `plan` says for it."""

    url: str = ""
    status: int = 200
    answer: bytes = b"ok"
    headers: dict[str, str] = field(default_factory=dict)
    got: list[Request] = field(default_factory=list)
    plan: Callable[[int], int] | None = None  # of the number of the request, from 0
    hold: threading.Event | None = None  # answers wait for it
    trickles: bool = False  # the answer comes byte by byte, without an end

    def wait(self, number: int) -> list[Request]:
        """Wait for so many requests; return all."""
        wait_for(lambda: len(self.got) >= number, f"{number} requests, of {len(self.got)}")
        return list(self.got)


@contextlib.contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """Run a receiver on loopback."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            number = len(receiver.got)
            receiver.got.append(
                Request(self.command, self.path, dict(self.headers), self.rfile.read(size))
            )
            if receiver.hold is not None:
                receiver.hold.wait(WAIT_SECONDS)
            with contextlib.suppress(OSError):  # the sender was killed meanwhile
                self.send_response(receiver.plan(number) if receiver.plan else receiver.status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                size = 1 << 20 if receiver.trickles else len(receiver.answer)
                self.send_header("Content-Length", str(size))
                self.end_headers()
                while receiver.trickles:
                    self.wfile.write(b".")
                    time.sleep(0.05)
                self.wfile.write(receiver.answer)

        do_GET = do_POST

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        if receiver.hold is not None:
            receiver.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class MailServer:
    """An SMTP server: what came, and whether each mail came encrypted and signed in."""

    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    envelopes: list[tuple[str, list[str]]] = field(default_factory=list)
    secure: list[bool] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)  # base64 of AUTH PLAIN
    refuse: str = ""  # the answer to each mail, where it is not taken

    def wait(self, number: int) -> list[EmailMessage]:
        wait_for(lambda: len(self.mails) >= number, f"{number} mails, of {len(self.mails)}")
        return list(self.mails)


class _Session:
    """One connection: enough of RFC 5321 for a client that checks its answers."""

    def __init__(
        self, server: MailServer, context: ssl.SSLContext | None,
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self.server, self.context = server, context
        self.reader, self.writer = reader, writer
        self.sender, self.recipients = "", list[str]()
        self.is_secure = False

    async def run(self) -> None:
        self.say("220 mail.test ESMTP")
        while line := (await self.reader.readline()).decode().strip():
            word = line.split()[0].upper()
            if word == "QUIT":
                self.say("221 bye")
                break
            if word == "STARTTLS" and self.context is not None:
                self.say("220 go on")
                await self.writer.start_tls(self.context)
                self.is_secure = True
            elif word == "DATA":
                self.say("354 end with a dot")
                await self.data()
            else:
                self.say(self.answer(word, line))
        self.writer.close()

    def answer(self, word: str, line: str) -> str:
        if word == "EHLO":
            offers = ["mail.test"]
            if self.context is not None and not self.is_secure:
                offers.append("STARTTLS")
            offers.append("AUTH PLAIN")
            return "\r\n".join([*(f"250-{one}" for one in offers[:-1]), f"250 {offers[-1]}"])
        if word == "AUTH":
            self.server.logins.append(line.split()[-1])
            return "235 welcome"
        if word == "MAIL":
            self.sender, self.recipients = line.partition(":")[2], []
        if word == "RCPT":
            self.recipients.append(line.partition(":")[2])
        return "250 ok"

    async def data(self) -> None:
        lines = []
        while (line := await self.reader.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
        if self.server.refuse:
            self.say(self.server.refuse)
            return
        mail: Any = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
        self.server.mails.append(mail)
        self.server.envelopes.append((self.sender, self.recipients))
        self.server.secure.append(self.is_secure)
        self.say("250 taken")

    def say(self, text: str) -> None:
        self.writer.write(text.encode() + b"\r\n")


@contextlib.contextmanager
def mail_server(certificate: Path | None = None, *, is_tls: bool = False) -> Iterator[MailServer]:
    """Run an SMTP server on loopback; with a certificate it offers STARTTLS, or begins with TLS."""
    found = MailServer()
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            session = _Session(found, None if is_tls else context, reader, writer)
            session.is_secure = is_tls
            await session.run()

    async def start() -> asyncio.Server:
        outer = context if is_tls else None
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=outer)

    server = loop.run_until_complete(start())
    found.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(asyncio.sleep(0.2))  # clients have gone: their ends are read
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def make_certificate(folder: Path) -> Path:
    """Return a file with a key and a certificate of 127.0.0.1 that signs itself."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=mail.test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
         "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    both = folder / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    return both
