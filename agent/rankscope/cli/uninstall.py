"""`rankscope uninstall`: what Rankscope keeps on this machine beside its package; removal."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rich.filesize import decimal
from rich.table import Table

from rankscope.cli.demo import data_directory
from rankscope.files import run_directory_choice
from rankscope.files.run_directory import rank_directories
from rankscope.files.start_collector import take_lock
from rankscope.native.probe.build import BuildError, probes_directory
from rankscope.node.ranks import leftovers
from rankscope.preflight import secret
from rankscope.terminal import SafeConsole, shown

EXIT_LEFT, EXIT_NOT_CONFIRMED = 1, 2
Kind = Literal["probes", "run", "lock of runs", "secret", "store"]


@dataclass(frozen=True)
class Remains:
    """One thing that is kept."""

    kind: Kind
    path: Path
    size_bytes: int
    what: str
    in_use_by: str = ""  # then it stays


class UninstallCommand:
    """Show what Rankscope keeps on this machine beside its package; with --purge remove it.

    That is: compiled probes, the files of recorded runs, the secret of preflights, and what
    `rankscope serve` and `rankscope demo` store where no folder is named. What is in use stays and
    is said; so does a folder of a server that you named (--data-dir, --database-url).

    The package itself is removed by what installed it, last: pip uninstall rankscope

    Examples:
      rankscope uninstall                    show what there is, remove nothing
      rankscope uninstall --purge            the same, ask, and remove it
      rankscope uninstall --purge --keep-store --yes

    Exit codes: 0 done, or shown; 1 something is in use or could not be removed; 2 not confirmed;
    64 wrong usage.
    """

    name: ClassVar[str] = "uninstall"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("--purge", action="store_true", help="remove what is shown")
        parser.add_argument("--yes", action="store_true", help="with --purge: ask nothing")
        parser.add_argument(
            "--keep-store", action="store_true", help="leave what servers of this user stored"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, arguments: argparse.Namespace) -> int:
        """Show, ask, remove; return the exit code."""
        console = SafeConsole(highlight=False)
        found = [
            one for one in remains(os.environ) if not (arguments.keep_store and one.kind == "store")
        ]
        if not arguments.json:
            _show(console, found)
        if not arguments.purge:
            if arguments.json:
                console.print_json(json.dumps({"found": [_as_json(one) for one in found]}))
            return 0
        if found and not arguments.yes and not _is_confirmed(found):
            return EXIT_NOT_CONFIRMED
        left = [(one, why) for one in found if (why := remove(one))]
        if arguments.json:
            document = {
                "removed": [_as_json(one) for one in found if one not in [it for it, _ in left]],
                "left": [_as_json(one) | {"why": why} for one, why in left],
            }
            console.print_json(json.dumps(document))
        for one, why in left:
            sys.stderr.write(f"rankscope uninstall: {shown(str(one.path))} stays: {shown(why)}\n")
        return EXIT_LEFT if left else 0


def remains(environ: Mapping[str, str]) -> Iterator[Remains]:
    """Yield what is kept for this user, each with its size."""
    with contextlib.suppress(BuildError):
        probes = probes_directory(environ)
        if probes.is_dir():
            yield Remains("probes", probes, leftovers.size_of(probes), "compiled for this PyTorch")
    for base in run_directory_choice.bases(environ):
        for path in _listed(base):
            if (path / "node").is_dir() or rank_directories(path):
                yield _run(path)
        lock = base / leftovers.LOCK
        if lock.is_file():
            yield Remains("lock of runs", lock, lock.stat().st_size, "")
    own = secret.own_path(environ)
    if own.is_file():
        yield Remains("secret", own, own.stat().st_size, "of preflights of several nodes")
    store = data_directory(environ)
    if store is not None and store.is_dir():
        by = "a server" if _is_served(store) else ""
        yield Remains("store", store, leftovers.size_of(store), "runs, findings, logs, tokens", by)


def _listed(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # it may not be read
        return sorted(folder.iterdir())
    return []


def _run(path: Path) -> Remains:
    is_alive = any(leftovers.lives(path / key) for key in rank_directories(path))
    is_held = (path / "node").is_dir() and leftovers.is_held(path)  # to ask makes the folder
    by = "its ranks" if is_alive else "its collector" if is_held else ""
    server = leftovers.server_of(path)
    what = (
        "a server has all of it" if (path / leftovers.DELIVERED).exists()
        else f"not all of it is at {server}" if server else "on this node only"
    )  # fmt: skip
    return Remains("run", path, leftovers.size_of(path), what, by)


def remove(one: Remains) -> str:
    """Remove it unless it is in use; return why it stays, "" where it is gone."""
    if one.in_use_by:
        return f"{one.in_use_by} uses it"
    try:
        with _held(one) as is_ours:
            if not is_ours:
                return "its collector uses it"
            if one.path.is_dir():
                shutil.rmtree(one.path)
            else:
                one.path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    with contextlib.suppress(OSError):  # others have files there
        one.path.parent.rmdir()
    return ""


@contextlib.contextmanager
def _held(one: Remains) -> Iterator[bool]:
    """Hold the lock of a run meanwhile; False where its collector has it."""
    descriptor = take_lock(one.path) if one.kind == "run" else -1
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)


def _is_served(store: Path) -> bool:
    """Return whether a server holds the lock of a database there."""
    for path in store.glob("*.lock"):
        with contextlib.suppress(OSError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _show(console: SafeConsole, found: list[Remains]) -> None:
    if not found:
        console.print("Rankscope keeps nothing on this machine beside its package.")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("what", "where", "size", ""):
        table.add_column(title, justify="right" if title == "size" else "left", overflow="fold")
    alike: dict[tuple[str, ...], list[Remains]] = defaultdict(list)
    for one in found:
        note = f"in use by {one.in_use_by}" if one.in_use_by else one.what
        place = one.path.parent if one.kind == "run" else one.path
        alike[one.kind, str(place), note].append(one)
    for (kind, where, note), some in alike.items():
        size = decimal(sum(one.size_bytes for one in some))
        table.add_row(f"{len(some)} runs" if len(some) > 1 else kind, where, size, note)
    console.print(table)
    total = decimal(sum(one.size_bytes for one in found))
    console.print(f"{total} in all. The package is removed by: pip uninstall rankscope")


def _is_confirmed(found: list[Remains]) -> bool:
    if not sys.stdin.isatty():
        sys.stderr.write("rankscope uninstall: nothing is removed without --yes in a script\n")
        return False
    sys.stderr.write(f"Remove {len(found)} of these for good? Type yes: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() == "yes"


def _as_json(one: Remains) -> dict[str, object]:
    return asdict(one) | {"path": str(one.path)}
