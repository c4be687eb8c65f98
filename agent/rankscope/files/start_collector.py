"""Starts the collector of this node if none runs. Standard library only: ranks import this."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from rankscope.files.run_directory import make_private

LOCK = "lock"
LOG = "collector.log"
_MAX_LOG_BYTES = 1 << 20
# what makes a process a rank, or would attach the agent to the collector
_DROPPED = frozenset({
    "RANKSCOPE", "RANKSCOPE_ATTACHED", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONWARNINGS",
})  # fmt: skip
_PACKAGES = Path(__file__).parents[2]  # the folder that holds the package rankscope
ATTACH_SITE = _PACKAGES / "rankscope" / "rank" / "attach" / "site"  # first on PYTHONPATH of ranks


def ensure_collector(run_directory: Path, environ: Mapping[str, str]) -> bool:
    """Start a detached collector for this run unless one runs; return whether one was started.

    The lock is taken here and inherited by the child, so of many callers one starts one. The
    shell in between ends at once: the collector is no child of the rank, and never a zombie in the
    training process. Raises OSError where there is no room, or no shell.
    """
    descriptor = take_lock(run_directory)
    if descriptor is None or not sys.executable:
        return False
    try:
        spawn = ["/bin/sh", "-c", '"$@" &', "sh", *command(run_directory, descriptor)]
        with open_log(run_directory) as log:
            subprocess.Popen(
                spawn,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                close_fds=True,
                pass_fds=(descriptor,),
                start_new_session=True,
                cwd="/",
                env=collector_environment(environ),
            ).wait()
    finally:
        os.close(descriptor)
    return True


def take_lock(run_directory: Path) -> int | None:
    """Return a descriptor that holds the lock of this run's node, None if it is held."""
    node = run_directory / "node"
    make_private(node)
    descriptor = os.open(node / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked_by(run_directory: Path, descriptor: int) -> bool:
    """Return whether this descriptor of `take_lock` is still that of the run's node."""
    try:
        status = os.stat(run_directory / "node" / LOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # the disk does not answer now
        return True
    return os.path.samestat(status, os.fstat(descriptor))


def command(run_directory: Path, lock_descriptor: int) -> list[str]:
    """Return the command line of a collector that inherits the lock."""
    return [
        sys.executable, "-P", "-m", "rankscope.node",
        "--run-dir", str(run_directory.absolute()), "--lock-fd", str(lock_descriptor),
    ]  # fmt: skip


def open_log(run_directory: Path) -> IO[bytes]:
    """Open the collector's log for appending; one that has grown large begins anew."""
    path = run_directory / "node" / LOG
    is_large = path.exists() and path.stat().st_size > _MAX_LOG_BYTES
    return path.open("wb" if is_large else "ab", buffering=0)


def collector_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a collector: the settings, nothing that makes it a rank."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _DROPPED and not name.startswith("TORCHELASTIC_")
    }
    paths = [
        os.path.abspath(path)
        for path in kept.get("PYTHONPATH", "").split(os.pathsep)
        if path and Path(path).absolute() != ATTACH_SITE
    ]
    if str(_PACKAGES) not in paths:
        paths.append(str(_PACKAGES))  # last: it may be site-packages itself
    # one thread for numpy's BLAS: it is imported, never used
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
