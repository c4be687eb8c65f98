"""Chooses the directory of this node for run directories: on a local disk or in memory.

Rings are mapped into memory and locks decide who collects. On network and user-space file systems
a lost server kills the process that touches the mapping (SIGBUS), and locks of two hosts do not
see each other; such a directory is refused, also where a setting names it. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MIN_BYTES = 16 << 20  # of the whole file system: all ranks must come to the same choice
_LOCAL = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "tmpfs", "ramfs",
    "overlay", "aufs", "rootfs",
})  # fmt: skip
_REMOTE = (
    "nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "beegfs", "ceph", "9p", "virtiofs", "afs",
    "ocfs2", "gfs2", "panfs", "orangefs", "pvfs2", "glusterfs", "wekafs",
)  # fmt: skip
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


class NoDirectoryError(OSError):
    """No directory can be used; the message says why each was refused."""


@dataclass(frozen=True)
class DirectoryChoice:
    """The base of run directories, and why the one that was asked for is not it."""

    base: Path
    note: str = ""


def choose(
    environ: Mapping[str, str], mounts: str | None = None, host: str = ""
) -> DirectoryChoice:
    """Return the base for the run directories of this node; nothing is created.

    $RANKSCOPE_DIR, else a directory of the user under $XDG_RUNTIME_DIR, the temporary directory
    or /dev/shm. `mounts` is the text of /proc/self/mountinfo. Raises NoDirectoryError.
    """
    text = _mounts() if mounts is None else mounts
    asked = environ.get("RANKSCOPE_DIR", "")
    refused: list[str] = []
    for wanted in _candidates(environ):
        kind = file_system(wanted, text)
        is_asked = bool(asked) and not refused  # the first one: another fault shows when it is made
        why = _is_remote(kind) or ("" if is_asked else _why_not(wanted))
        if why:
            refused.append(f"{wanted}: {why}")
            continue
        base = wanted
        if kind not in _LOCAL:  # perhaps another host has it too: a directory for each
            base = wanted / (host or os.uname().nodename)
        note = f"{refused[0]}; files are in {base} instead" if asked and refused else ""
        return DirectoryChoice(base, note)
    raise NoDirectoryError("; ".join(refused))


def bases(environ: Mapping[str, str]) -> list[Path]:
    """Return what is there of the directories that may hold runs: the one that is named, or all."""
    if named := environ.get("RANKSCOPE_DIR"):
        return [path for path in (Path(named).absolute(),) if path.is_dir()]
    # others can make a directory of our name where all may write
    found = (path for path in dict.fromkeys(_candidates(environ)) if path.is_dir())
    return [path for path in found if path.lstat().st_uid == os.getuid()]


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds `path`, there already or not; "" unknown."""
    place = os.path.realpath(path)
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) < 5:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount on the same point hides the earlier
            best, kind = len(point), types[0]
    return kind


def is_writable(path: Path) -> bool:
    """Return whether this directory can be written, or made where it is not there yet."""
    existing = _existing(path)
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)


def _existing(path: Path) -> Path:
    while not os.path.exists(path) and path != path.parent:  # also where we may not look
        path = path.parent
    return path


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    if asked := environ.get("RANKSCOPE_DIR"):
        yield Path(asked).absolute()
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "rankscope"
    for parent in (environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"):
        if parent:
            yield Path(parent).absolute() / f"rankscope-{os.getuid()}"


def _is_remote(kind: str) -> str:
    if kind.startswith(_REMOTE):
        return f"{kind} is a network or user-space file system, rings and locks need a local one"
    return ""


def _why_not(wanted: Path) -> str:
    """Return why no run can be recorded there, empty if one can."""
    if wanted.is_symlink() and wanted.lstat().st_uid != os.getuid():
        return "a link that belongs to another user"
    existing = _existing(wanted)
    if not existing.is_dir():
        return f"{existing} is no directory"
    if existing == wanted and existing.stat().st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    if not is_writable(existing):
        return f"{existing} is not writable"
    size = os.statvfs(existing)
    if size.f_blocks * size.f_frsize < MIN_BYTES:
        return f"a file system of less than {MIN_BYTES >> 20} MiB"
    return ""


def _mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""
