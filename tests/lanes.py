"""One collection, run by several forked processes at once.

    pytest -p tests.lanes --lanes 3 --minutes 12

First three runs of real processes at once; then what is marked `quiet`, two at once; then what is
marked `alone`. Tests of one process fill what those leave of the processors, at a lower priority.
A fork costs nothing where another process would have to import PyTorch and to collect once more.

Tests that share a fixture of their module stay together, as do those marked `together`. Those that
take longest come first: `tests/seconds.json` says how long they took (`--remember` writes it).

What is long (`is_long`) comes last, the browser's tests beside it, in an order that the commit
draws: another part of it runs at each. With `--minutes` none begins that would end later; those
left out are skipped, and say so. `make test-all` leaves out nothing.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Literal, NoReturn, get_args

import pytest
from _pytest.main import Session
from _pytest.reports import TestReport

from tests import capabilities, command_server, fork_server
from tests.server import postgres

Kind = Literal["run", "browser", "quiet", "alone", "plain"]
SECONDS = Path(__file__).with_name("seconds.json")
ROOT = Path(__file__).parents[1]
PLAIN = ("analysis", "known_errors", "score", "simulator")  # folders of tests that only compute
_PLAIN_NICE = 5  # a run, whose time is measured, gets a processor at once
_PLAIN_GC = (100_000, 50, 100)  # simulated runs are millions of objects: 8 % less, 15 MB more
_PLAIN_LIMIT_S = 1200.0  # the limit of all tests is too short for those that let others pass
_NUM_QUIET = 2
_UNKNOWN_S = 0.05  # of a test that is not in the file
_REMEMBERED_S = 0.3
_QUICK_S, _LONG_S = 0.3, 1.0  # shorter than the one, and from the other on
_OF_REAL_PROCESSES = ("multiproc", "quiet", "alone", "browser", "laboratory")
LEFT_OUT = "long, and the time was over"
_SILENT = ("terminalreporter", "outcomes")  # plugins that hear of each test in the parent


@dataclass(frozen=True)
class Unit:
    """Tests that one process runs one after the other."""

    kind: Kind
    items: tuple[int, ...]  # places among those collected
    is_long: bool = False
    seconds: float = 0.0  # that it took when they were remembered


@dataclass(frozen=True)
class Phase:
    """How many processes of each kind begin."""

    lanes: dict[Kind, int]
    may_be_long: bool = False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes")
    group.addoption("--lanes", type=int, default=0, help="so many runs at once; 0: as ever")
    group.addoption("--quick", action="store_true", help="only what is tested within a process")
    group.addoption("--always", action="store_true", help="without what `--minutes` may leave out")
    group.addoption("--remember", action="store_true", help="write how long tests took")
    group.addoption(
        "--minutes", type=float, default=0.0, help="begin nothing long that would end later; 0: all"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--lanes") and not config.getoption("--collect-only"):
        config.pluginmanager.register(Lanes(config), "lanes-of-tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    took = seconds()
    if config.getoption("--quick"):
        _choose(config, items, [_is_quick(item, took) for item in items])
    elif config.getoption("--always"):
        _choose(config, items, [not is_long(item, took) for item in items])


def _choose(config: pytest.Config, items: list[pytest.Item], is_chosen: list[bool]) -> None:
    rest = [item for item, is_kept in zip(items, is_chosen, strict=True) if not is_kept]
    config.hook.pytest_deselected(items=rest)
    items[:] = itertools.compress(items, is_chosen)


def _is_quick(item: pytest.Item, took: dict[str, float]) -> bool:
    if item.get_closest_marker("quick"):
        return True
    is_run = any(map(item.get_closest_marker, _OF_REAL_PROCESSES))
    needs = {name for mark in item.iter_markers("needs") for name in mark.args} - {"compiler"}
    if is_run or needs or _uses_postgres(item):
        return False
    return took.get(item.nodeid, 0.0) < _QUICK_S


def is_long(item: pytest.Item, took: dict[str, float]) -> bool:
    """Return whether a test may be left out of a run whose time is bounded.

    That is what starts real processes and what took long, but for what is marked `core`.
    """
    if item.get_closest_marker("core") or item.get_closest_marker("quick"):
        return False
    is_run = any(map(item.get_closest_marker, _OF_REAL_PROCESSES))
    return is_run or took.get(item.nodeid, 0.0) >= _LONG_S


def seconds() -> dict[str, float]:
    """Return how long the slow tests took, by name."""
    found: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return found


def kind_of(item: pytest.Item) -> Kind:
    """Return where a test runs."""
    if item.get_closest_marker("alone"):
        return "alone"
    if item.get_closest_marker("quiet"):
        return "quiet"
    if item.get_closest_marker("browser"):
        return "browser"  # its event loop runs on: other tests could not start one
    if item.get_closest_marker("multiproc"):
        return "run"
    path = item.path.relative_to(ROOT).parts if item.path.is_relative_to(ROOT) else ()
    return "plain" if path[:1] == ("tests",) and path[1] in PLAIN else "run"


def units(items: list[pytest.Item]) -> list[Unit]:
    """Return what runs together: the longest first, then what is long as the commit draws it."""
    took = seconds()
    members: dict[tuple[Kind, str, bool], list[int]] = {}
    for place, item in enumerate(items):
        key = (kind_of(item), _together(item), is_long(item, took))
        members.setdefault(key, []).append(place)

    def unit(kind: Kind, places: list[int], *, may_be_left_out: bool) -> Unit:
        length = sum(took.get(items[place].nodeid, _UNKNOWN_S) for place in places)
        return Unit(kind, tuple(places), may_be_left_out, length)

    found = [unit(kind, at, may_be_left_out=long) for (kind, _, long), at in members.items()]
    core = sorted((unit for unit in found if not unit.is_long), key=lambda unit: -unit.seconds)
    commit = _commit()

    def lot(unit: Unit) -> bytes:
        return hashlib.sha256(f"{commit} {items[unit.items[0]].nodeid}".encode()).digest()

    return core + sorted((unit for unit in found if unit.is_long), key=lot)


def _commit() -> str:
    command = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _together(item: pytest.Item) -> str:
    """Return a name that tests have in common which must run together."""
    group = item.get_closest_marker("together")
    if group is not None:
        return str(group.args[0])
    if item.get_closest_marker("browser"):
        return str(item.path)
    info = getattr(item, "_fixtureinfo", None)
    known = [defs[-1] for defs in info.name2fixturedefs.values() if defs] if info else []
    shared = any(one.scope != "function" and one.baseid for one in known)  # not those of pytest
    is_alone = kind_of(item) != "plain" and not shared
    return item.nodeid if is_alone else str(item.path)


def _uses_postgres(item: pytest.Item) -> bool:
    """Return whether a test shares the server of PostgreSQL."""
    call = getattr(item, "callspec", None)
    # a value may be an array, which is equal to nothing but an array
    values = call.params.values() if call else ()
    return "postgres" in getattr(item, "fixturenames", ()) or any(
        isinstance(value, str) and value == postgres.KIND for value in values
    )


def _phases(runs: int) -> list[Phase]:
    """Return what begins, one phase after the other; the browser's tests are in one of them.

    Most of what only computes is left for when little else runs.
    """
    beside = max(1, (os.cpu_count() or 1) - 1)
    return [
        Phase({"run": runs, "plain": 1}),
        Phase({"quiet": _NUM_QUIET, "plain": beside}),
        Phase({"alone": 1}),
        Phase({"run": runs, "browser": 1, "plain": 1}, may_be_long=True),
        Phase({"quiet": _NUM_QUIET, "plain": beside}, may_be_long=True),
        Phase({"alone": 1}, may_be_long=True),
        Phase({"plain": 1}, may_be_long=True),
    ]


class Lanes:
    """Hands out units to the processes, and reports what they say as if it were run here."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[Kind, deque[Unit]] = {}
        self._took: dict[str, float] = {}
        self._num_forked = 0
        minutes = config.getoption("--minutes")
        self._ends_at = time.monotonic() + 60.0 * minutes if minutes else math.inf
        self._until = self._ends_at  # for what is long of the phase
        self._phases = _phases(config.getoption("--lanes"))
        self._phase = self._phases[0]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Session) -> bool:
        """Run all tests."""
        if session.testsfailed and not self._config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        base = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._sort(session.items)
        if any(waiting for kind, waiting in self._waiting.items() if kind != "plain"):
            fork_server.share(base / "fork-server")
            command_server.share(base / "command-server")
        is_used = not capabilities.lacks("postgres") and any(map(_uses_postgres, session.items))
        with postgres.shared() if is_used else contextlib.nullcontext():
            gc.collect()
            gc.freeze()  # a process that collects would copy all that was imported here
            for phase in self._phases:
                self._begin(phase)
                for kind, number in phase.lanes.items():
                    for _ in range(number):
                        self._fork(session, base, kind)
                kinds = phase.lanes.keys()
                self._hand_out(session, base, until_ended=kinds - {"plain"} or {"plain"})
        if self._config.getoption("--remember"):
            self._remember()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        self._report_left_out(session)
        return True

    def _sort(self, items: list[pytest.Item]) -> None:
        for item in items:
            if kind_of(item) == "plain":
                item.add_marker(pytest.mark.timeout(_PLAIN_LIMIT_S))
        waiting, kinds = units(items), get_args(Kind)
        self._waiting = {kind: deque(u for u in waiting if u.kind == kind) for kind in kinds}

    def _hand_out(self, session: Session, base: Path, until_ended: Collection[Kind]) -> None:
        """Give units to all that ask, until the processes of some kinds have ended."""
        try:
            while any(key.data.kind in until_ended for key in self._selector.get_map().values()):
                for key, _ in self._selector.select():
                    self._serve(session, base, key.data)
        except BaseException:
            lanes = [key.data for key in self._selector.get_map().values()]
            for lane in lanes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(lane.pid, signal.SIGINT)  # a terminal has told them already
            for lane in lanes:
                self._end(lane)
            raise

    def _serve(self, session: Session, base: Path, lane: Lane) -> None:
        try:
            said = lane.connection.recv()
        except (EOFError, ConnectionError):
            self._end(lane)
            self._report_death(session, lane)
            self._fork(session, base, lane.kind)
            return
        if said == "more":
            unit = None if session.shouldfail else self._next(lane.kind)
            if unit is not None:
                self._waiting[unit.kind].remove(unit)
                lane.ahead += unit.items
            with contextlib.suppress(ConnectionError):
                lane.connection.send(unit.items if unit else ())
        elif said == "ended":
            self._end(lane)
            if lane.kind != "run":
                self._fork(session, base, "run")  # in its place, while there are any
        elif isinstance(said, int):
            lane.started(said)
        else:
            hook = self._config.hook
            report = hook.pytest_report_from_serializable(config=self._config, data=said)
            name = report.nodeid
            self._took[name] = self._took.get(name, 0.0) + report.duration
            hook.pytest_runtest_logreport(report=report)

    def _next(self, kind: Kind) -> Unit | None:
        """Return what a process of a kind runs next, if there is any and time for it.

        What only computes and must run comes before what is long.
        """
        for name in (kind, "plain") if self._phase.may_be_long and kind == "run" else (kind,):
            waiting = self._waiting[name]
            if waiting and not waiting[0].is_long:
                return waiting[0]
        if not self._phase.may_be_long:
            return None
        left_s = self._until - time.monotonic()
        return next((unit for unit in self._waiting[kind] if unit.seconds <= left_s), None)

    def _begin(self, phase: Phase) -> None:
        """Share out the time that is left among this phase and those after it."""
        self._phase = phase
        if not phase.may_be_long:
            return
        later = [one for one in self._phases[self._phases.index(phase) :] if one.may_be_long]
        own, *others = map(self._length_s, later)
        now = time.monotonic()
        self._until = now + (self._ends_at - now) * own / max(own + sum(others), 1.0)

    def _length_s(self, phase: Phase) -> float:
        """Return about how long what waits for a phase would take."""
        return max(
            sum(unit.seconds for unit in self._waiting[kind]) / number
            for kind, number in phase.lanes.items()
            if kind != "plain" or len(phase.lanes) == 1
        )

    def _report_left_out(self, session: Session) -> None:
        """Say of what is left out that it was, to all but the terminal: there a number does."""
        plugins = self._config.pluginmanager
        terminal = plugins.getplugin("terminalreporter")
        report_to = plugins.subset_hook_caller("pytest_runtest_logreport", {terminal} - {None})
        left = [
            place for waiting in self._waiting.values() for unit in waiting for place in unit.items
        ]
        for item in (session.items[place] for place in left):
            path, line, _ = item.location
            why = (path, line or 0, f"Skipped: {LEFT_OUT}")
            report_to(report=TestReport(item.nodeid, item.location, {}, "skipped", why, "setup"))
        if left and terminal is not None:
            terminal.write_line(f"\n{len(left)} tests left out: {LEFT_OUT}")

    def _report_death(self, session: Session, lane: Lane) -> None:
        """Fail the test that a process died in, and give what it had not begun to another."""
        for place in reversed(lane.ahead):
            self._waiting[lane.kind].appendleft(Unit(lane.kind, (place,)))
        if lane.at is not None:
            item = session.items[lane.at]
            report = TestReport(
                item.nodeid, item.location, {}, "failed", "its process died", "call"
            )
            self._config.hook.pytest_runtest_logreport(report=report)

    def _fork(self, session: Session, base: Path, kind: Kind) -> None:
        if self._next(kind) is None:
            return
        ours, theirs = Pipe()
        self._num_forked += 1
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: those of a library that minds forks
            pid = os.fork()
        if pid == 0:
            for key in self._selector.get_map().values():
                key.fileobj.close()  # type: ignore[union-attr]
            ours.close()
            _be_lane(session, theirs, base / f"lane{self._num_forked}", kind)
        theirs.close()
        self._selector.register(ours, selectors.EVENT_READ, Lane(pid, ours, kind))

    def _end(self, lane: Lane) -> None:
        self._selector.unregister(lane.connection)
        lane.connection.close()
        os.waitpid(lane.pid, 0)

    def _remember(self) -> None:
        took = seconds() | self._took
        slow = {name: round(s, 1) for name, s in sorted(took.items()) if s >= _REMEMBERED_S}
        SECONDS.write_text(json.dumps(slow, indent=0) + "\n")


class Lane:
    """What the parent knows of one process."""

    def __init__(self, pid: int, connection: Connection, kind: Kind) -> None:
        self.pid, self.connection, self.kind = pid, connection, kind
        self.ahead: list[int] = []  # what it got and has not begun
        self.at: int | None = None

    def started(self, place: int) -> None:
        """Note what it runs now."""
        self.ahead = [later for later in self.ahead if later != place]
        self.at = place


def _be_lane(session: Session, connection: Connection, base: Path, kind: Kind) -> NoReturn:
    """Be one process: run what the parent says, tell it what became of it, and end."""
    config, code = session.config, 0
    try:
        if kind == "plain":
            os.nice(_PLAIN_NICE)
            gc.set_threshold(*_PLAIN_GC)
        base.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
        capture = config.pluginmanager.getplugin("capturemanager")
        for name in _SILENT:
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)
        of_parent = capture._global_capturing if capture is not None else None
        if capture is not None:  # else all would write into the parent's files
            capture._global_capturing = None
            capture.start_global_capturing()
            capture.suspend_global_capture()
        config.pluginmanager.register(_Teller(config, connection), "teller")
        # a browser and its servers are for all its tests; else nothing is kept from unit to unit
        _run(session, connection, keeps=kind == "browser")
        del of_parent  # not before: it would warn that it was not closed
        connection.send("ended")
    except BaseException:  # noqa: BLE001 - the parent sees that it died
        code = 1
        session._setupstate.teardown_exact(None)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run(session: Session, connection: Connection, *, keeps: bool) -> None:
    places = _ask(connection)
    while places:
        later: tuple[int, ...] | None = None
        for place, after in zip_longest(places, places[1:]):
            connection.send(place)
            if after is None and keeps:
                later = _ask(connection)
                after = later[0] if later else None
            item = session.items[place]
            following = session.items[after] if after is not None else None  # what both need stays
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        places = _ask(connection) if later is None else later


def _ask(connection: Connection) -> tuple[int, ...]:
    connection.send("more")
    places: tuple[int, ...] = connection.recv()
    return places


class _Teller:
    """Tells the parent of each report."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        """Send a report."""
        hook = self._config.hook
        self._connection.send(
            hook.pytest_report_to_serializable(config=self._config, report=report)
        )
