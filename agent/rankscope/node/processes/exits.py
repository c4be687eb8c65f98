"""How a process ended: where its exit status can be read, and what reason follows from it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rankscope.files import ring

EXITS_FILE = "exits.jsonl"
MAX_EXITS_BYTES = 4 << 20
PROC = Path("/proc")
_STATE_FIELD, _STATUS_FIELD = 3, 52  # of /proc/<pid>/stat, counted from 1
# ioctl of a pidfd, Linux 6.15: returns the status of a process that is reaped already
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<Q52xi")
_RINGS_ENDED = {
    ring.CLEAN: "clean", ring.EXCEPTION: "exception", ring.UNLOADED: "unloaded",
    ring.FINISHED: "finished",
}  # fmt: skip

Reason = Literal["clean", "exception", "exit_code", "signal", "lost"]


@dataclass(frozen=True)
class ExitStatus:
    """An exit code or a signal, and what reported it."""

    exit_code: int | None
    signal: int | None
    source: str


def from_wait_status(status: int, source: str) -> ExitStatus:
    """Take apart the status word that wait(2) and /proc give."""
    if status & 0x7F:
        return ExitStatus(None, status & 0x7F, source)
    return ExitStatus((status >> 8) & 0xFF, None, source)


def from_code(code: int, source: str) -> ExitStatus:
    """Take a code in the way of Python and torchrun: negative for a signal."""
    return ExitStatus(None, -code, source) if code < 0 else ExitStatus(code, None, source)


def read_zombie(pid: int, proc: Path = PROC) -> ExitStatus | None:
    """Return the status of a process that is dead and not yet reaped, else None."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    if len(fields) <= _STATUS_FIELD - 3 or fields[0] not in (b"Z", b"X"):
        return None
    return from_wait_status(int(fields[_STATUS_FIELD - 3]), "/proc, before it was reaped")


def read_pidfd(descriptor: int) -> ExitStatus | None:
    """Return the status of a reaped process where the kernel returns it (Linux 6.15), else None."""
    buffer = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(buffer, 0, _PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, status = _PIDFD_INFO.unpack(buffer)
    return from_wait_status(status, "the kernel's pidfd") if mask & _PIDFD_INFO_EXIT else None


class ExitStatuses:
    """`node/exits.jsonl`: what anyone on this node learnt of an exit, by pid.

    The collector writes what it saw at once, so that it survives a collector that is killed; the
    launcher writes what torchrun reports.
    """

    def __init__(self, node_directory: Path) -> None:
        self._path = node_directory / EXITS_FILE
        self._offset = 0
        self._by_pid: dict[int, tuple[int, ExitStatus]] = {}

    def write(self, pid: int, start_ticks: int, status: ExitStatus) -> None:
        """Append a line, unless the file has grown too large. Raises OSError."""
        append(self._path, pid, status, start_ticks)

    def find(self, pid: int, start_ticks: int) -> ExitStatus | None:
        """Return what is known of this process."""
        self._read()
        ticks, status = self._by_pid.get(pid, (0, None))
        return status if ticks in (0, start_ticks) or start_ticks == 0 else None

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_EXITS_BYTES)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                pid, ticks = int(entry["pid"]), int(entry.get("start_ticks", 0))
                code, number = entry.get("exit_code"), entry.get("signal")
                status = ExitStatus(
                    None if code is None else int(code),
                    None if number is None else int(number),
                    str(entry["source"])[:200],
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            self._by_pid[pid] = (ticks, status)


def append(path: Path, pid: int, status: ExitStatus, start_ticks: int = 0) -> None:
    """Append one line to an exits file; a file that grew too large is left. Raises OSError."""
    entry = {"pid": pid, "source": status.source, "time_ns": time.time_ns()}
    if status.exit_code is not None:
        entry["exit_code"] = status.exit_code
    if status.signal is not None:
        entry["signal"] = status.signal
    if start_ticks:
        entry["start_ticks"] = start_ticks
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size < MAX_EXITS_BYTES:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(descriptor)


def reason_of(ended: int, status: ExitStatus | None) -> tuple[Reason, str]:
    """Return the reason of an end and one sentence; `ended` is what the ring's header says."""
    ended_by = _RINGS_ENDED.get(ended)
    if ended_by == "finished":
        return "clean", "training was over; then the process was ended by what had started it"
    if status is None:
        if ended_by in ("clean", "exception"):
            return ended_by, "the exit status was gone; the process itself said how it ends"  # type: ignore[return-value]
        return "lost", (
            "gone without a trace: the process said nothing and its exit status was already "
            "reaped; SIGKILL, os._exit or a lost host look like this"
        )
    if status.signal is not None:
        after = ", after an exception left the script" if ended_by == "exception" else ""
        return (
            "signal",
            f"killed by {signal_name(status.signal)}{after}; reported by {status.source}",
        )
    detail = f"exit code {status.exit_code}; reported by {status.source}"
    if ended_by == "exception":
        return "exception", detail
    if status.exit_code == 0:
        left = "" if ended_by else " (it left without Python's exit handlers, as os._exit does)"
        return "clean", detail + left
    return "exit_code", detail


def signal_name(number: int) -> str:
    """Return for example "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


class OomWatch:
    """Counts kills by the kernel's OOM killer: in the cgroup of a process, and on the host."""

    def __init__(self, proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroups = cgroups

    def counter_of(self, pid: int) -> Path | None:
        """Return the file that counts for this process; to be called while it lives."""
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers in ("", "memory"):
                name = "memory.events" if controllers == "" else "memory.oom_control"
                for root in (self._cgroups / controllers, self._cgroups / "unified"):
                    for place in (root / path.lstrip("/"), root):
                        if (place / name).exists():
                            return place / name
        return None

    def count(self, counter: Path | None) -> int:
        """Return the kills counted so far in the cgroup, or on the host where it has none."""
        path = counter or self._proc / "vmstat"
        try:
            lines = path.read_text().splitlines()
        except OSError:
            return 0
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdecimal():
                return int(value)
        return 0
