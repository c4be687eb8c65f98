"""What touches a file system, in a process that may hang there: run by path, prints JSON.

A program of the standard library alone, started with `-I -S`: two hundredths of a second. Each
look at a folder is one, so it imports as little as it can.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time

TYPE_CHECKING = False  # a checker of types knows the name
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PREFIX = ".rankscope-preflight-"
_PIECE_BYTES = 4 << 20


def look(folder: str) -> dict[str, Any]:
    """Return what stat and statvfs say."""
    found = os.stat(folder)
    room = os.statvfs(folder)
    return {
        "is_directory": os.path.isdir(folder),
        "is_writable": os.access(folder, os.W_OK | os.X_OK),
        "is_read_only": bool(room.f_flag & os.ST_RDONLY),
        "total_bytes": room.f_blocks * room.f_frsize,
        "free_bytes": room.f_bavail * room.f_frsize,
        "total_inodes": room.f_files,
        "free_inodes": room.f_favail,
        "inode": found.st_ino,
        "mounted_at": _mount_point(folder),
    }


def can_write(paths: list[str]) -> dict[str, Any]:
    """Return, by path, why nothing can be made there; "" if it can, in the nearest that exists."""
    found = {}
    for path in paths:
        place = os.path.abspath(path)
        while not os.path.lexists(place) and os.path.dirname(place) != place:
            place = os.path.dirname(place)
        found[path] = "" if os.access(place, os.W_OK | os.X_OK) else _why_closed(place)
    return {"closed": found}


def _why_closed(place: str) -> str:
    if not os.path.isdir(place):
        return f"{place} is no directory"
    try:
        is_read_only = bool(os.statvfs(place).f_flag & os.ST_RDONLY)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return f"{place} is on a read-only mount" if is_read_only else f"{place} may not be written"


def put(folder: str, name: str, token: str) -> dict[str, Any]:
    """Write a small file for the others to find: whole, or not at all."""
    path = os.path.join(folder, name)
    unfinished = f"{path}.new"
    with open(unfinished, "w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return {}


def see(folder: str, names: list[str], seconds: float) -> dict[str, Any]:
    """Read files of others, again until all are there or the time is over."""
    end = time.monotonic() + seconds
    found: dict[str, str] = {}
    while True:
        os.listdir(folder)  # asks the server anew, where names that are absent are remembered
        for name in set(names) - set(found):
            try:
                with open(os.path.join(folder, name)) as file:
                    text = file.read()
            except FileNotFoundError:
                continue
            found |= {name: text} if text else {}
        if len(found) == len(set(names)) or time.monotonic() > end:
            return {"found": found}
        time.sleep(0.1)


def write(folder: str, name: str, size: int, seconds: float) -> dict[str, Any]:
    """Write until the size or the time is reached, then fsync; the file is removed."""
    path = os.path.join(folder, name)
    piece, written, started = os.urandom(_PIECE_BYTES), 0, time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        while written < size and time.monotonic() - started < seconds:
            written += os.write(descriptor, piece[: size - written])
        os.fsync(descriptor)
        elapsed = time.monotonic() - started
    finally:
        os.close(descriptor)
        _remove(path)
    return {"written_bytes": written, "elapsed_s": elapsed}


def lock(folder: str, name: str) -> dict[str, Any]:
    """Take and give back both kinds of locks on a file of our own."""
    path = os.path.join(folder, name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return {
            "flock": _tried(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX)),
            "fcntl": _tried(lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX)),
        }
    finally:
        os.close(descriptor)
        _remove(path)


def clean(folder: str, names: list[str]) -> dict[str, Any]:
    """Remove files of ours."""
    for name in names:
        if name.startswith(PREFIX):
            _remove(os.path.join(folder, name))
    return {}


def walk(folder: str, most: int, seconds: float) -> dict[str, Any]:
    """Fingerprint names and sizes of the first files in sorted order."""
    import hashlib

    digest, count, total = hashlib.sha256(), 0, 0
    end = time.monotonic() + seconds
    os.listdir(folder)  # os.walk hides that a directory is absent
    for base, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(base, name)
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                size = -1  # a link that leads nowhere
            digest.update(f"{os.path.relpath(path, folder)}\0{size}\n".encode(errors="replace"))
            count, total = count + 1, total + max(size, 0)
            if count >= most or time.monotonic() > end:
                bound = "count" if count >= most else "time"
                return {"count": count, "bytes": total, "digest": digest.hexdigest(), "cut": bound}
    return {"count": count, "bytes": total, "digest": digest.hexdigest(), "cut": ""}


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _mount_point(folder: str) -> str:
    path = os.path.realpath(folder)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _tried(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return _words(error)
    return ""


def _words(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"


_WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "look": look, "put": put, "see": see, "write": write, "lock": lock, "clean": clean,
    "walk": walk, "can_write": can_write,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Do one thing: `storage_child.py WORK JSON-ARGUMENTS`."""
    sys.stdout.write("started\n")
    sys.stdout.flush()
    try:
        answer = _WORK[arguments[0]](*json.loads(arguments[1]))
    except OSError as error:
        answer = {"error": _words(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
