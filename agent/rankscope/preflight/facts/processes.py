"""Processes of this machine as /proc shows them: who holds a socket, what an older job left."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from rankscope.preflight.facts.host import user_name
from rankscope.preflight.system import System
from rankscope.wire.redaction import redact

MAX_COMMAND = 160  # characters of a command line that are kept
MIN_OLDER_S = 10.0  # processes of the same launch start within it: they are no leftovers
_LAUNCHER = re.compile(r"\btorchrun\b|torch[./]distributed[./](run|launch)")
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True)
class Socket:
    """A listening socket."""

    port: int
    inode: int
    user: str


@dataclass(frozen=True)
class Process:
    """A process; `age_s` is how long it has been running."""

    pid: int
    parent: int
    command: str
    user: str
    age_s: float


class Leftover(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training process older than this preflight that holds a port or a GPU."""

    pid: int
    command: str
    user: str = ""
    age_s: float = 0.0
    ports: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


def own_pid() -> int:
    """Return the pid of this process."""
    return os.getpid()


def listening(system: System) -> tuple[Socket, ...]:
    """Return all listening TCP sockets of this network namespace."""
    found = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (system.read(path) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTEN:
                port = int(words[1].rpartition(":")[2], 16)
                found.append(Socket(port, int(words[9]), user_name(int(words[7]))))
    return tuple(found)


def visible(system: System) -> Iterator[Process]:
    """Yield all processes, of any user."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    uptime_s = float((system.read("/proc/uptime") or "0").split()[0])
    for name in system.names("/proc"):
        stat = system.read(f"/proc/{name}/stat") if name.isdigit() else None
        if not stat:
            continue
        fields = stat.rpartition(")")[2].split()  # a command may hold blanks and brackets
        if len(fields) > 19:
            started_s = int(fields[19]) / ticks_per_s
            yield Process(
                pid=int(name),
                parent=int(fields[1]),
                command=_command(system, name) or stat.partition("(")[2].rpartition(")")[0],
                user=_user(system, name),
                age_s=max(0.0, uptime_s - started_s),
            )


def socket_inodes(system: System, pid: int) -> set[int]:
    """Return the sockets that a process holds; none if it is not ours to see."""
    inodes = set()
    for number in system.names(f"/proc/{pid}/fd"):
        target = system.link(f"/proc/{pid}/fd/{number}")
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def leftovers(system: System, since_unix_s: float) -> tuple[Leftover, ...]:
    """Return own training processes older than `since_unix_s` that hold a port or a GPU."""
    uid_name = user_name(os.geteuid())
    age_limit_s = time.time() - since_unix_s + MIN_OLDER_S
    processes = {process.pid: process for process in visible(system)}
    related = _own_family(processes)
    sockets = {row.inode: row.port for row in listening(system)}
    found = []
    for process in processes.values():
        if process.user != uid_name or process.age_s < age_limit_s or process.pid in related:
            continue
        if not is_training(system, process):
            continue
        ports = {sockets[i] for i in socket_inodes(system, process.pid) if i in sockets}
        gpus = _gpus(system, process.pid)
        if ports or gpus:
            found.append(
                Leftover(
                    pid=process.pid,
                    command=process.command,
                    user=process.user,
                    age_s=process.age_s,
                    ports=tuple(sorted(ports)),
                    gpus=gpus,
                )
            )
    return tuple(found)


def is_training(system: System, process: Process) -> bool:
    """Return whether a process is a launcher or a rank of distributed training."""
    if re.search(r"\brankscope\b.*\bpreflight\b", process.command):
        return False  # ourselves, or another preflight
    if _LAUNCHER.search(process.command):
        return True
    text = system.read(f"/proc/{process.pid}/environ") or ""
    names = {entry.partition("=")[0] for entry in text.split("\0")}
    return {"RANK", "WORLD_SIZE"} <= names and "python" in process.command.partition(" ")[0]


def launchers(processes: Mapping[int, Process]) -> set[int]:
    """Return those ancestors of this process that launch ranks."""
    return {
        pid
        for pid in _ancestors(processes)
        if pid in processes and _LAUNCHER.search(processes[pid].command)
    }


def _ancestors(processes: Mapping[int, Process]) -> list[int]:
    """Return this process and all above it, up to the first of the machine or container."""
    line = [own_pid()]
    while line[-1] in processes and processes[line[-1]].parent not in (0, 1, *line):
        line.append(processes[line[-1]].parent)
    return line


def _own_family(processes: Mapping[int, Process]) -> set[int]:
    """Return the pids of this launch: the ancestors, and all that our own launcher started."""
    family, roots = set(_ancestors(processes)), {own_pid(), *launchers(processes)}
    for process in processes.values():
        above = process.parent
        while above in processes and above not in roots and above > 1:
            above = processes[above].parent
        if above in roots:
            family.add(process.pid)
    return family


def _gpus(system: System, pid: int) -> tuple[int, ...]:
    """Return the NVIDIA devices that a process has open."""
    targets = (system.link(f"/proc/{pid}/fd/{n}") for n in system.names(f"/proc/{pid}/fd"))
    hits = (re.fullmatch(r"/dev/nvidia(\d+)", target) for target in targets)
    return tuple(sorted({int(hit[1]) for hit in hits if hit}))


def _command(system: System, pid: str) -> str:
    words = (system.read(f"/proc/{pid}/cmdline") or "").split("\0")
    return redact(" ".join(word for word in words if word))[:MAX_COMMAND]


def _user(system: System, pid: str) -> str:
    for line in (system.read(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("Uid:"):
            return user_name(int(line.split()[2]))  # the effective one
    return ""
