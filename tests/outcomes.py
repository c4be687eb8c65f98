"""What became of each test, written as it happens, so that a group that dies leaves what it knew.

    pytest -p tests.outcomes --outcomes FILE [--resume]

With `--resume` what passed by that file does not run again.

One JSON object a line. A test may have several lines (a failure after it passed): the worst holds.
The last line is empty of facts: without it pytest did not come to its end, whatever its exit code.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

import pytest

State = Literal["passed", "skipped", "failed"]
_END = "{}"
_PASSED = pytest.StashKey[set[str]]()
_BADNESS: dict[State, int] = {"passed": 0, "skipped": 1, "failed": 2}


@dataclass(frozen=True)
class Outcome:
    """The end of one test, or of a whole command that is counted as one."""

    name: str
    state: State
    reason: str = ""  # why it was skipped, or did not even start
    is_unsteady: bool = False  # it failed before it passed
    seconds: float = 0.0  # of its fixtures too, where it was the first to need them


class Writer:
    """Writes what pytest reports."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = before + report.duration
        if report.failed:
            self._write(report.nodeid, "failed")
        elif report.skipped:
            # an expected failure is reported as skipped: it did what was said
            is_expected = hasattr(report, "wasxfail")
            self._write(report.nodeid, "passed" if is_expected else "skipped", _reason(report))
        elif report.when != "setup":
            self._write(report.nodeid, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", "it cannot be collected")
        elif report.skipped:
            self._write(report.nodeid, "skipped", _reason(report))

    def pytest_sessionfinish(self) -> None:
        self._file.write(_END + "\n")
        self._file.flush()

    def _write(self, name: str, state: State, reason: str = "") -> None:
        outcome = Outcome(name, state, reason, seconds=round(self._seconds.get(name, 0.0), 2))
        self._file.write(json.dumps(asdict(outcome)) + "\n")
        self._file.flush()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write what became of each test into this file")
    parser.addoption("--resume", action="store_true", help="leave out what passed by that file")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # the workers' chief hears of all
        passed = _passed(path) if config.getoption("--resume") else []
        config.stash[_PASSED] = {outcome.name for outcome in passed}
        file = path.open("w", encoding="utf-8")
        config.add_cleanup(file.close)
        file.writelines(json.dumps(asdict(outcome)) + "\n" for outcome in passed)
        config.pluginmanager.register(Writer(file), "outcomes")


def _passed(path: Path) -> list[Outcome]:
    return [outcome for outcome in read(path)[0] if outcome.state == "passed"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = config.stash.get(_PASSED, set())
    done = [item for item in items if item.nodeid in passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in passed]


def read(path: Path) -> tuple[list[Outcome], bool]:
    """Return one outcome for each test of a file, and whether pytest came to its end."""
    worst: dict[str, Outcome] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        if line == _END:
            continue
        outcome = Outcome(**json.loads(line))
        before = worst.setdefault(outcome.name, outcome)
        worse = max(before, outcome, key=lambda either: _BADNESS[either.state])
        worst[outcome.name] = replace(worse, seconds=max(before.seconds, outcome.seconds))
    return list(worst.values()), _END in lines
