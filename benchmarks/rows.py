"""Results that are kept a line each, so that a benchmark of hours goes on where it was stopped.

A row has its key, what was varied, and its label: the code that it was measured on. Of two rows of
the same key and label the later one counts. What is there for a label is not run again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import rankscope

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TORCH = importlib.metadata.version("torch").partition("+")[0]  # that runs, without its build
_CODE = ("agent", "server", "reference_trainer")
Key: TypeAlias = tuple[Any, ...]


def code_label(*more: str) -> str:
    """Return a name of the code that runs: the same for every commit that leaves it as it is.

    It ends with "+" where there are changes that no commit has, which a name cannot tell apart.
    `more`: folders that count too.
    """
    folders = (*_CODE, *more)
    trees = _git("rev-parse", *(f"HEAD:{folder}" for folder in folders))
    if not trees:
        return rankscope.__version__
    changed = _git("status", "--porcelain", "--", *folders)
    return hashlib.sha256(trees.encode()).hexdigest()[:10] + ("+" if changed else "")


def parser_of(
    about: str | None, name: str, *, sources: Iterable[str], seeds: int, least_seconds: float
) -> argparse.ArgumentParser:
    """Return the options that every benchmark of forced sources has, with its own defaults.

    `about` is its docstring; `name` is that of its file of results.
    """
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--sources", default=",".join(sources), help="with commas between")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--least-seconds", type=float, default=least_seconds, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--label", default=code_label(), help="of the code (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / name)
    parser.add_argument("--table", action="store_true", help="run nothing")
    return parser


class Rows:
    """One file of rows, written by any thread. `keys` are the fields that name a row."""

    def __init__(self, path: Path, keys: Sequence[str], label: str) -> None:
        self.path, self.label = path, label
        self._keys = keys
        self._lock = threading.Lock()

    def all(self) -> list[dict[str, Any]]:
        """Return the rows of this label, the last of each key."""
        return newest(self.path, self._keys, self.label)

    def missing(self, wanted: Iterable[Key]) -> list[Key]:
        """Return which of these keys have no row yet, in their order."""
        known = {tuple(row[key] for key in self._keys) for row in self.all()}
        return [key for key in wanted if key not in known]

    def add(self, key: Key, values: dict[str, Any]) -> dict[str, Any]:
        """Append a row and return it."""
        row = dict(zip(self._keys, key, strict=True)) | {"label": self.label} | values
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row


def newest(path: Path, keys: Sequence[str], label: str = "") -> list[dict[str, Any]]:
    """Return the last row of each key, of one label or, without one, whatever code it is of."""
    found: dict[Key, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if label in ("", row["label"]):
            found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def keep(name: str, result: Any) -> None:
    """Append what was measured once, a dataclass, with the code, the day and the load."""
    measured = {
        "label": code_label(), "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[2], 1),  # of the last quarter of an hour
    } | asdict(result)  # fmt: skip
    with (RESULTS / name).open("a") as file:
        file.write(json.dumps(measured) + "\n")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""
