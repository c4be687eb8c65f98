"""Which code a training process runs: hash of its script, commit of its checkout, changed or not.

Git itself is not asked: its hooks, filters and locks are the user's. Its files are read, with a
bound on bytes and time; what cannot be found within it is left out, or "unknown".
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_BYTES = 4 << 20  # of any file that is read
_MAX_PARENTS = 32
_MAX_HASHED = 64  # files whose time, not size, differs from what the index says
_SECONDS = 0.02  # for the state of the working tree: 2,000 files on a local disk, few on a slow one
_SHA1_BYTES, _SHA256_BYTES = 20, 32


def code_facts(script: Path, seconds: float = _SECONDS) -> dict[str, str]:
    """Return name and hash of the script, and commit and state of the checkout it is in."""
    text = _read(script)
    if text is None:
        return {}
    facts = {"code.script": script.name, "code.hash": hashlib.sha256(text).hexdigest()[:12]}
    parents = list(script.resolve().parents)[:_MAX_PARENTS]
    root = next((folder for folder in parents if (folder / ".git").exists()), None)
    if root is not None:
        git = _git_directory(root)
        commit = _commit(git)
        if commit:
            facts["code.commit"] = commit
            facts["code.dirty"] = _dirty(root, git, len(commit) // 2, seconds)
    return facts


def _git_directory(root: Path) -> Path:
    """Return where git keeps a checkout: a worktree and a submodule name it in a file."""
    git = root / ".git"
    if git.is_dir():
        return git
    text = (_read(git) or b"").decode(errors="replace").strip()
    return root / text.removeprefix("gitdir:").strip()


def _commit(git: Path) -> str:
    """Return the commit that is checked out, empty where there is none."""
    head = _line(git / "HEAD")
    if not head.startswith("ref:"):
        return head if _is_hash(head) else ""
    name = head.removeprefix("ref:").strip()
    common = git / (_line(git / "commondir") or ".")
    for place in (git, common):
        text = _line(place / name)
        if _is_hash(text):
            return text
    for line in (_read(common / "packed-refs") or b"").decode(errors="replace").splitlines():
        if line.endswith(f" {name}"):
            return line.split()[0]
    return ""


def _is_hash(text: str) -> bool:
    return len(text) in (2 * _SHA1_BYTES, 2 * _SHA256_BYTES) and not text.strip("0123456789abcdef")


def _line(path: Path) -> str:
    return (_read(path) or b"").decode(errors="replace").strip()


def _read(path: Path) -> bytes | None:
    """Return a regular file's bytes, None for what is none, too large or not to be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file as the index knows it. Times are whole seconds and the nanoseconds beyond."""

    name: bytes
    mode: int
    mtime: tuple[int, int]
    size: int
    digest: bytes


def _dirty(root: Path, git: Path, digest_bytes: int, seconds: float) -> str:
    """Return yes if a tracked file differs from the index, no, or unknown.

    What is staged and not committed is not seen: that takes the objects of the last commit.
    """
    text = _read(git / "index")
    if text is None:
        return "unknown"
    end = time.monotonic() + seconds
    doubtful = []
    try:
        for number, entry in enumerate(_entries(text, digest_bytes)):
            if number % 16 == 0 and time.monotonic() > end:
                return "unknown"
            state = _state(root, entry)
            if state == "changed":
                return "yes"
            if state == "touched":
                doubtful.append(entry)
    except (struct.error, ValueError, IndexError):  # another format of the index
        return "unknown"
    if len(doubtful) > _MAX_HASHED:
        return "unknown"
    return _by_content(root, doubtful, end)


def _by_content(root: Path, entries: list[_Entry], end: float) -> str:
    """Return whether the content of a file is another one than the index knows."""
    for entry in entries:
        content = _read(root / os.fsdecode(entry.name)) if time.monotonic() <= end else None
        if content is None:
            return "unknown"
        blob = b"blob %d\0" % len(content) + content
        method = hashlib.sha1 if len(entry.digest) == _SHA1_BYTES else hashlib.sha256
        if method(blob, usedforsecurity=False).digest() != entry.digest:
            return "yes"
    return "no"


def _state(root: Path, entry: _Entry) -> str:
    if not stat.S_ISREG(entry.mode):  # a link, or a submodule
        return "same"
    try:
        status = os.lstat(root / os.fsdecode(entry.name))
    except FileNotFoundError:
        return "changed"
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    # Git writes size 0 for a file that changed in the second in which the index was written.
    if entry.size and status.st_size & 0xFFFFFFFF != entry.size:
        return "changed"
    same = entry.mtime in ((seconds, nanoseconds), (seconds, 0))
    return "same" if same and entry.size == status.st_size & 0xFFFFFFFF else "touched"


def _entries(text: bytes, digest_bytes: int) -> Iterator[_Entry]:
    """Yield the files of an index, versions 2 to 4 (git's Documentation/gitformat-index)."""
    mark, version, count = struct.unpack_from(">4sII", text)
    if mark != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("no index that is known")
    place, name = 12, b""
    for _ in range(count):
        begin = place
        fields = struct.unpack_from(">10I", text, place)
        digest = text[place + 40 : place + 40 + digest_bytes]
        place += 40 + digest_bytes
        (flags,) = struct.unpack_from(">H", text, place)
        place += 2
        skipped = bool(flags & 0x8000)  # "assume unchanged"
        if flags & 0x4000:
            (more,) = struct.unpack_from(">H", text, place)
            place += 2
            skipped |= bool(more & 0x4000)  # outside a sparse checkout
        if version == 4:
            dropped, place = _offset(text, place)
            end = text.index(b"\0", place)
            name = name[: len(name) - dropped] + text[place:end]
            place = end + 1
        else:
            end = text.index(b"\0", place)
            name = text[place:end]
            place = begin + (end - begin + 8) // 8 * 8
        if not skipped:
            yield _Entry(name, fields[6], (fields[2], fields[3]), fields[9], digest)


def _offset(text: bytes, place: int) -> tuple[int, int]:
    """Return a number of variable length, as packs write it, and where the next byte is."""
    value = text[place] & 0x7F
    while text[place] & 0x80:
        place += 1
        value = (value + 1) << 7 | text[place] & 0x7F
    return value, place + 1
