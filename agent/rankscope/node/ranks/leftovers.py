"""What earlier runs left on this node: it is delivered, and deleted some time after that.

A collector marks a run as delivered when all its processes are gone and the server has everything.
Runs without that mark whose collector died (with the machine's power, or for want of a server)
get one again, one after the other. What a server should have and has not is never deleted, nor a
run of which a process lives or which a collector holds. Runs that were recorded without a server
go, the oldest first, where all directories are too large and no delivered one is left. One
collector of a base directory looks at a time.

A run goes to one server. Where it is launched again under its name for another one, the batches
that wait for the first are set aside until a collector of the run is started for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rankscope.address import AddressError, read_address
from rankscope.files import ring
from rankscope.files.run_directory import (
    COLLECTIVES_RING,
    clean_run_id,
    make_private,
    rank_directories,
    replace_file,
)
from rankscope.files.start_collector import ensure_collector, take_lock
from rankscope.node.ranks.rank import COLLECTED
from rankscope.node.upload.spool import SUFFIX
from rankscope.process.family import process_start_ticks
from rankscope.settings import Settings

DELIVERED = "node/delivered"
SERVER = "node/server"  # where the run is sent to: leftovers go there and nowhere else
SPOOL = "node/spool"
LOCK = "leftovers.lock"
MAX_RUNS = 100  # that are delivered by one look
_DELIVERY_SECONDS = 120.0  # a collector without a server gives up after one minute
_POLL_SECONDS = 0.25

logger = logging.getLogger(__name__)


class Leftovers(threading.Thread):
    """Looks once at the other runs beside `run_directory`; ends when it is done."""

    def __init__(
        self,
        run_directory: Path,
        settings: Settings,
        environ: Mapping[str, str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="rankscope-leftovers", daemon=True)
        self._run_directory = run_directory
        self._settings = settings
        self._environ = environ
        self._wall = wall

    def run(self) -> None:
        """Deliver, then delete."""
        try:
            descriptor = os.open(self._run_directory.parent / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            others = [path for path in runs(self._run_directory.parent) if self._is_other(path)]
            self.deliver(others)
            self.delete(others)
        except OSError as error:  # held by another one, or a full disk
            logger.debug("leftovers are not looked at: %s", error)
        finally:
            os.close(descriptor)

    def deliver(self, others: list[Path]) -> None:
        """Give each run that is not yet delivered a collector, and wait for its end."""
        waiting = [path for path in others if not (path / DELIVERED).exists()]
        for path in waiting[:MAX_RUNS]:
            if self._is_for_our_server(path) and ensure_collector(path, self._environ):
                logger.info("delivering what is left of run %s", path.name)
                deadline = time.monotonic() + _DELIVERY_SECONDS
                while is_held(path) and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)

    def delete(self, others: list[Path]) -> None:
        """Delete delivered runs that are too old, and the oldest while all are too large."""
        delivered = sorted((_mtime(path / DELIVERED), path) for path in others)
        delivered = [(since, path) for since, path in delivered if since]
        local = sorted((_mtime(path), path) for path in others if is_local(path))
        sizes = {path: size_of(path) for _, path in (*delivered, *local)}
        total = sum(sizes.values())
        for since, path in (*delivered, *local):
            is_old = self._wall() - since > self._settings.keep_hours * 3600
            goes = (is_old and not is_local(path)) or total > self._settings.keep_bytes
            if goes and delete_run(path):
                total -= sizes[path]

    def _is_other(self, path: Path) -> bool:
        return path != self._run_directory

    def _is_for_our_server(self, path: Path) -> bool:
        try:
            own = read_address(self._settings.server).url
        except AddressError:
            return False
        return server_of(path) == own


def server_of(run_directory: Path) -> str:
    """Return the address of the server that a run is sent to, empty where none is known."""
    try:
        return read_address((run_directory / SERVER).read_text().strip()).url
    except (OSError, ValueError):
        return ""


def is_local(run_directory: Path) -> bool:
    """Return whether a run was recorded without a server: it is on this node alone."""
    is_sent = server_of(run_directory) or (run_directory / DELIVERED).exists()
    return not is_sent and not num_set_aside(run_directory)


def choose_server(run_directory: Path, server: str) -> int:
    """Leave in the spool what is for this server; return how many batches wait for others.

    To be called before the spool is read. Raises OSError.
    """
    before = server_of(run_directory)
    if before and before != server:
        _move_batches(run_directory / SPOOL, _aside(run_directory, before))
    _move_batches(_aside(run_directory, server), run_directory / SPOOL)
    replace_file(run_directory / SERVER, server.encode())
    return num_set_aside(run_directory)


def num_set_aside(run_directory: Path) -> int:
    """Return how many batches wait for another server than the run's."""
    return len(list(run_directory.glob(f"{SPOOL}.*/*{SUFFIX}")))


def _aside(run_directory: Path, server: str) -> Path:
    name = f"{SPOOL}.{clean_run_id(server)}-{zlib.crc32(server.encode()):08x}"
    return run_directory / name


def _move_batches(source: Path, target: Path) -> None:
    for path in source.glob(f"*{SUFFIX}"):
        make_private(target)
        os.replace(path, target / path.name)


def runs(base: Path) -> list[Path]:
    """Return the run directories of a base that have had a collector, oldest first."""
    try:
        found = [path for path in base.iterdir() if (path / "node").is_dir()]
    except OSError:
        return []
    return sorted((path for path in found if not path.is_symlink()), key=lambda p: _mtime(p))


def delete_run(path: Path) -> bool:
    """Delete a run unless it is still needed; return whether it is gone."""
    descriptor = take_lock(path)
    if descriptor is None:
        return False
    try:
        if _is_in_use(path) or not (is_local(path) or (path / DELIVERED).exists()):
            return False
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("run directory %s could not be deleted: %s", path, error)
        return False
    finally:
        os.close(descriptor)
    return True


def is_held(path: Path) -> bool:
    """Return whether a collector runs there."""
    descriptor = take_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def size_of(path: Path) -> int:
    """Return the bytes of all files below a directory."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def lives(rank_directory: Path) -> bool:
    """Return whether the process that writes there is alive."""
    try:
        with (rank_directory / COLLECTIVES_RING).open("rb") as file:
            fields = ring.IDENTITY.unpack(file.read(ring.IDENTITY.size))
    except (OSError, struct.error):
        return False  # no ring, or a torn one: it has been read as far as possible
    pid, start_ticks = fields[4], fields[10]
    return bool(start_ticks) and process_start_ticks(pid) == start_ticks


def _is_in_use(path: Path) -> bool:
    """Return whether some process of the run lives, or has not been read for a server."""
    directories = [path / key for key in rank_directories(path)]
    is_read = is_local(path) or all((one / COLLECTED).exists() for one in directories)
    return not is_read or any(map(lives, directories))


def _mtime(path: Path) -> float:
    """Return when a file was changed, 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
