"""Where the files of a run are on one node, and how a run gets its name.

    <base>/<run_id>/<attempt>/<rank>.<pid>/   collectives.ring steps.ring journal.N stacks fatal
    <base>/<run_id>/node/                     the collector: lock, pid, spool, offsets, log

`<base>` is $RANKSCOPE_DIR, else a directory of the user under $XDG_RUNTIME_DIR or the temporary
directory, in any case on a local disk: `run_directory_choice` chooses it. Everything is 0700: the
files hold log lines and stacks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

COLLECTIVES_RING = "collectives.ring"
STEPS_RING = "steps.ring"
STACKS = "stacks"
FATAL = "fatal"
OUTPUTS = "outputs.json"
FLIGHT_SETUP = "flight.json"  # what the collector may ask at the socket
FLIGHT_SOCKET = "control.sock"  # of torch's control server
# of a rank directory, below that of the run: attempt, rank, process
RANK_KEY = re.compile(r"(\d{1,9})/(\d{1,9})\.(\d{1,9})(?:\.\d{1,4})?")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_RUN_ID_LENGTH = 80


def run_directory(base: Path, run_id: str) -> Path:
    """Return the directory of one run."""
    return base / run_id


def rank_directory(
    run: Path,
    attempt: int,
    rank: int,
    pid: int,
    is_taken: Callable[[Path], bool] = lambda ring: False,
) -> Path:
    """Return the directory that one training process writes.

    In containers numbers of processes come again: where the ring of an earlier one `is_taken`
    the directory is a fresh one, `<rank>.<pid>.2`.
    """
    directory = run / str(attempt) / f"{rank}.{pid}"
    number = 1
    while is_taken(directory / COLLECTIVES_RING):
        number += 1
        directory = directory.with_name(f"{rank}.{pid}.{number}")
    return directory


def rank_directories(run_directory: Path, *, latest_only: bool = False) -> list[str]:
    """Return the keys of the rank directories of all attempts, or of the latest one."""
    attempts = sorted((name for name in _names(run_directory) if name.isdecimal()), key=int)
    found = []
    for attempt in attempts[-1:] if latest_only else attempts:
        found += [f"{attempt}/{name}" for name in sorted(_names(run_directory / attempt))]
    return [key for key in found if RANK_KEY.fullmatch(key)]


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def node_directory(run: Path) -> Path:
    """Return the directory of the node collector."""
    return run / "node"


def make_private(directory: Path) -> None:
    """Make a directory and what is missing above it, for the owner only. Raises OSError.

    `mkdir(parents=True)` would give the mode to the last one alone.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def clean_run_id(text: str) -> str:
    """Return `text` as a run id: letters, digits, dot, dash and underscore, not empty."""
    cleaned = _UNSAFE.sub("-", text).strip("-.")[:MAX_RUN_ID_LENGTH]
    return cleaned or "run"


def is_of_each_process(path: str) -> bool:
    """Return whether a path names another file in each process that opens it, as /dev/stdout."""
    return path.startswith(("/dev/", "/proc/")) and not path.startswith("/dev/shm/")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it.

    It is the owner's alone. Raises OSError.
    """
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb", opener=partial(os.open, mode=0o600)) as file:
        file.write(data)
    os.replace(new, path)
