"""The outside world of the facts: files, commands, names. Tests hand in a recorded one."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from rankscope.preflight.links import Link, read_links

RESOLVE_LIMIT_S = 3.0
_LAST_WORDS_S = 1.0  # in which a killed child is gone, unless the kernel holds it


class Resolved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one name, in the order of the resolver."""

    name: str
    addresses: tuple[str, ...] = ()
    canonical: str = ""  # the full name that the resolver says belongs to it
    error: str = ""  # "EAI_NONAME: Name or service not known", "no answer in 3 s"
    elapsed_ms: float = 0.0


@dataclass(frozen=True)
class Done:
    """A command that ended. `code` is None if it could not start, or was ended at its limit."""

    code: int | None
    out: str = ""
    err: str = ""


@dataclass(frozen=True)
class Space:
    """Room in a file system, for this user."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class System:
    """This machine, or a recorded one under `root`."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str | None:
        """Return the text of a file; None if it is absent, unreadable, or no text."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return None

    def read_bytes(self, path: str) -> bytes | None:
        """Return the bytes of a file; None if it is absent or unreadable."""
        try:
            return (self.root / path.lstrip("/")).read_bytes()
        except OSError:
            return None

    def why_closed(self, path: str) -> str:
        """Return why a device cannot be opened for reading and writing; empty: it can."""
        try:
            os.close(os.open(self.root / path.lstrip("/"), os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {path}"
        return ""

    def read_int(self, path: str) -> int | None:
        """Return the number in a file; None if there is none."""
        text = (self.read(path) or "").strip()
        return int(text) if text.lstrip("-").isdigit() else None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; none if it is absent."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def link(self, path: str) -> str:
        """Return where a symbolic link points, as it is written there; "" if it is none."""
        try:
            return os.readlink(self.root / path.lstrip("/"))
        except OSError:
            return ""

    def links(self) -> tuple[Link, ...]:
        """Return the interfaces of this process's network namespace."""
        return read_links()

    def space(self, path: str) -> Space | None:
        """Return the room where a local path is; None if it is absent.

        Only for file systems in memory: on a hung mount this call never returns.
        """
        try:
            found = os.statvfs(self.root / path.lstrip("/"))
        except OSError:
            return None
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def hostname(self) -> str:
        """Return the host name of this process's namespace."""
        return (self.read("/proc/sys/kernel/hostname") or socket.gethostname()).strip()

    def addresses(self) -> tuple[str, ...]:
        """Return all addresses of this network namespace, loopback included, without scopes."""
        rows = [row for found in psutil.net_if_addrs().values() for row in found]
        families = (socket.AF_INET, socket.AF_INET6)
        return tuple(row.address.partition("%")[0] for row in rows if row.family in families)

    def run(self, argv: Sequence[str], limit_s: float = 5.0) -> Done:
        """Run a command in its own session; past the limit it and its children are killed."""
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True, env=dict(self.environ),
            )  # fmt: skip
        except OSError as error:
            return Done(None, err=str(error))
        try:
            out, err = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            out = _abandon(child)
            return Done(None, out, err=f"{argv[0]}: no answer in {limit_s:g} s")
        return Done(child.returncode, out, err)

    def resolve(self, name: str, limit_s: float = RESOLVE_LIMIT_S) -> Resolved:
        """Ask the resolver as training would; a resolver that hangs is left behind."""
        found: list[Resolved] = []
        started = time.monotonic()

        def ask() -> None:
            found.append(_ask(name, started))

        thread = threading.Thread(target=ask, name="preflight-resolve", daemon=True)
        thread.start()
        thread.join(limit_s)
        if found:
            return found[0]
        return Resolved(name=name, error=f"no answer in {limit_s:g} s", elapsed_ms=limit_s * 1e3)

    def full_name(self, limit_s: float = RESOLVE_LIMIT_S) -> str:
        """Return the own name with its domain, as torchrun asks for it; "" where that hangs."""
        found: list[str] = []
        thread = threading.Thread(
            target=lambda: found.append(socket.getfqdn()), name="preflight-name", daemon=True
        )
        thread.start()
        thread.join(limit_s)
        return found[0] if found else ""

    def reverse(self, address: str, limit_s: float = RESOLVE_LIMIT_S) -> float:
        """Return how many ms the name of `address` takes to be found, or found to be absent."""
        started = time.monotonic()
        thread = threading.Thread(
            target=_ask_back, args=(address,), name="preflight-reverse", daemon=True
        )
        thread.start()
        thread.join(limit_s)
        return (time.monotonic() - started) * 1e3


def _ask_back(address: str) -> None:
    with contextlib.suppress(OSError):
        socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)


def _abandon(child: subprocess.Popen[str]) -> str:
    """Kill a child and its session, return its output. One stuck in the kernel is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=_LAST_WORDS_S)[0]
    except subprocess.TimeoutExpired as error:
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        threading.Thread(target=child.wait, name="preflight-reap", daemon=True).start()
        so_far: object = error.output  # bytes, whatever the child was opened for
        return so_far.decode(errors="replace") if isinstance(so_far, bytes) else ""


def _ask(name: str, started: float) -> Resolved:
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except UnicodeError as error:  # an empty label, or one over 63 characters
        text = f"no host name: {error.__cause__ or error}"
        return Resolved(name=name, error=text, elapsed_ms=(time.monotonic() - started) * 1e3)
    except OSError as error:
        word = _EAI.get(error.errno or 0, str(error.errno))
        text = f"{word}: {error.strerror}"
        return Resolved(name=name, error=text, elapsed_ms=(time.monotonic() - started) * 1e3)
    return Resolved(
        name=name,
        addresses=tuple(dict.fromkeys(str(row[4][0]) for row in rows)),
        canonical=next((row[3] for row in rows if row[3]), ""),
        elapsed_ms=(time.monotonic() - started) * 1e3,
    )


_EAI = {
    getattr(socket, name): name
    for name in ("EAI_AGAIN", "EAI_FAIL", "EAI_NODATA", "EAI_NONAME", "EAI_SYSTEM")
    if hasattr(socket, name)
}
