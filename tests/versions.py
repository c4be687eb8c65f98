"""Runs the matrix of paths on several versions of PyTorch and prints a table: path by version.

    python tests/versions.py                            # 2.6, 2.9, 2.13 and the newest release
    python tests/versions.py --torch 2.9.1 --path ddp   # one version, one path
    make versions

Each version gets an environment of its own, made once and kept in --cache (some GB each). A cell
is `pass`, `skip` with its reason below the table, or `FAIL`; any FAIL makes the exit code 1, and a
version that cannot be installed or run at all makes it 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.6.0", "2.9.1", "2.13.0", "newest")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rankscope" / "versions"
TESTS = ("tests/matrix", "tests/trainer/each_strategy.py")
_CASE = re.compile(r"test_(?P<test>\w+)\[(?P<source>[a-z]+)(-(?P<path>\w+))?\]")


@dataclass(frozen=True)
class Cell:
    """One path on one version by one source of collectives."""

    version: str
    source: str
    path: str
    outcome: str  # pass, skip or FAIL
    reason: str = ""


class CannotRun(Exception):
    """This version could not be tried at all; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    broken: dict[str, str] = {}
    for wanted in options.torch or VERSIONS:
        try:
            version = newest() if wanted == "newest" else wanted
            if any(cell.version == version for cell in cells):
                continue
            sys.stderr.write(f"PyTorch {version} ...\n")
            cells += run(environment(version, options.cache), version, options.path)
        except CannotRun as reason:
            broken[wanted] = str(reason)
    if options.json:
        document = {"cells": [asdict(cell) for cell in cells], "not_run": broken}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        sys.stdout.write(table(cells))
        for version, why in broken.items():
            sys.stdout.write(f"{version}: not run: {why}\n")
    if broken or not cells:
        return 2
    return int(any(cell.outcome == "FAIL" for cell in cells))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", action="append", metavar="VERSION",
        help="an exact version, or 'newest'; may be given again (default: all four)",
    )  # fmt: skip
    parser.add_argument(
        "--cache", type=Path, default=CACHE,
        help="where the environments are kept, as torch-VERSION (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--path", default="", help="only tests that match this, as pytest's -k")
    parser.add_argument("--json", action="store_true", help="all cells as JSON")
    return parser


def newest() -> str:
    """Return the newest release of PyTorch that pip would install here."""
    done = _run([sys.executable, "-m", "pip", "index", "versions", "torch"])
    found = re.search(r"torch \(([0-9.]+)\)", done.stdout)
    if done.returncode or found is None:
        raise CannotRun(f"pip does not tell the newest version: {done.stderr.strip()[-300:]}")
    return found[1]


def environment(version: str, cache: Path) -> Path:
    """Return the Python of the environment for a version, making it first where it is not there."""
    directory = cache / f"torch-{version}"
    python = directory / "bin" / "python"
    if not python.exists():
        _must([sys.executable, "-m", "venv", str(directory)])
    ask = "import importlib.metadata as m; print(m.version('torch')); m.version('numpy')"
    present = _run([str(python), "-c", ask])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if present.returncode:
        _must([*pip, f"torch=={version}", "numpy>=1.26,<3"])
    elif present.stdout.strip().split("+")[0] != version:
        raise CannotRun(f"{directory} holds torch {present.stdout.strip()}")
    ask = "import rankscope, hypothesis, pytest, pytest_timeout; print(rankscope.__file__)"
    present = _run([str(python), "-c", ask])
    if present.returncode or not present.stdout.startswith(str(ROOT)):
        # named again by exact version, so that pip cannot exchange it
        _must([*pip, f"torch=={version}", "-e", str(ROOT), "pytest>=8.3,<10", "pytest-timeout",
               "hypothesis>=6.100,<7"])  # fmt: skip
    return python


def run(python: Path, version: str, path: str) -> list[Cell]:
    """Run the matrix with this Python and return its cells."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            str(python), "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider",
            f"--junitxml={report}", f"--basetemp={scratch}/work",
        ]  # fmt: skip
        done = _run([*command, *(["-k", path] if path else [])], cwd=ROOT)
        if not report.exists():
            raise CannotRun((done.stdout + done.stderr).strip()[-1000:])
        return [_cell(case, version) for case in ElementTree.parse(report).iter("testcase")]


def _cell(case: ElementTree.Element, version: str) -> Cell:
    named = _CASE.fullmatch(case.get("name", ""))
    if named is None:
        source, path = "-", case.get("name", "")
    else:
        source, path = named["source"], named["path"] or named["test"]
    for child in case:
        if child.tag == "skipped":
            return Cell(version, source, path, "skip", child.get("message", ""))
        if child.tag in ("failure", "error"):
            return Cell(version, source, path, "FAIL", child.get("message", "")[:1000])
    return Cell(version, source, path, "pass")


def table(cells: list[Cell]) -> str:
    """Return paths as rows, versions with their sources as columns, and the reasons below."""
    columns = list(dict.fromkeys((cell.version, cell.source) for cell in cells))
    missing = {  # a source that this version does not have at all is one line, not a column
        column for column in columns
        if all(cell.outcome == "skip" for cell in cells if _column(cell) == column)
    }  # fmt: skip
    shown = [column for column in columns if column not in missing]
    outcome = {(cell.path, *_column(cell)): cell.outcome for cell in cells}
    rows = [["path", *(f"{version} {source}" for version, source in shown)]]
    for path in dict.fromkeys(cell.path for cell in cells):
        rows.append([path, *(outcome.get((path, *column), "-") for column in shown)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    reasons: dict[str, None] = {}
    for cell in cells:
        if cell.outcome != "pass":
            where = "all paths" if _column(cell) in missing else cell.path
            reason = " ".join(cell.reason.split())[:300]
            reasons[f"{cell.outcome}: {cell.version} {cell.source}, {where}: {reason}"] = None
    return "\n".join([*lines, "", *reasons]) + "\n"


def _column(cell: Cell) -> tuple[str, str]:
    return cell.version, cell.source


def _run(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def _must(command: list[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise CannotRun(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    sys.exit(main())
