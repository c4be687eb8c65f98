"""Detectors that take long look rarer at a large job; what is urgent and the last look do not."""

from __future__ import annotations

from time import thread_time
from typing import ClassVar

import pytest

from rankscope.wire.schema import RankEnded
from rankscope_server.analysis import pacing, state
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran
from tests.simulator.delivery import apply
from tests.simulator.job import Job
from tests.simulator.records import MS, START_NS, Recording

S = 1000 * MS


class Looking:
    """A detector that takes so long and counts its looks."""

    finds: ClassVar[str] = "nothing"
    needs: ClassVar[str] = "nothing"
    silent: ClassVar[str] = "always"

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self.seconds = name, seconds  # type: ignore[misc]
        self.num_looks = 0
        self.says: tuple[Finding, ...] = ()

    def look(self, window: Window) -> DetectorResult:
        self.num_looks += 1
        until = thread_time() + self.seconds
        while thread_time() < until:
            pass
        return ran(self, self.says, (f"{self.name} {self.num_looks}",))


@pytest.fixture
def running() -> RunState:
    found = RunState("run")
    items = list(Recording(Job(data=2, steps=20)).items())
    apply(found, items[: len(items) // 2])
    return found


def looks(run: RunState, times_s: list[float], *, defers: bool = True) -> list[str]:
    """Look at these times; return what was checked in the last look."""
    for time_s in times_s:
        for attempt in run._attempts.values():
            attempt.is_news = True
        look = run.look(START_NS + int((60 + time_s) * S), defers=defers)
    return [text for one in run._attempts[0].results for text in one.checked if look is not None]


def put(monkeypatch: pytest.MonkeyPatch, *detectors: Looking) -> None:
    monkeypatch.setattr(state, "DETECTORS", detectors)


def test_what_takes_long_looks_rarer_and_what_it_said_stays(
    running: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow, urgent = Looking("quick"), Looking("slow", 0.03), Looking("hang", 0.03)
    put(monkeypatch, quick, slow, urgent)
    said = looks(running, [0, 1, 2, 3])  # 0.03 s of a core are due after 6 s and more
    assert (quick.num_looks, slow.num_looks, urgent.num_looks) == (4, 1, 4)
    assert said == ["quick 4", "slow 1", "hang 4"]
    looks(running, [pacing.MOST_SECONDS + 1])
    assert slow.num_looks == 2


def test_all_that_follow_look_where_one_finds_something_else(
    running: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, finds, after = Looking("before", 0.03), Looking("hang"), Looking("after", 0.03)
    put(monkeypatch, before, finds, after)
    looks(running, [0, 1])
    assert (before.num_looks, after.num_looks) == (1, 1)
    window = running._attempts[0].window(START_NS + 62 * S)
    finding = window.finding(
        "hang", "one", severity="warning", ranks=(1,), what="w", why="y", next="n",
        confidence=(0.9, "seen"), ruled_out=("all",), disproof="none",
    )  # fmt: skip
    finds.says = (finding,)
    looks(running, [2])
    assert (before.num_looks, after.num_looks) == (1, 2)
    looks(running, [3])  # the same again is nothing else
    assert (before.num_looks, after.num_looks) == (1, 2)


def test_outside_of_the_live_loop_and_after_the_end_all_look(
    running: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Looking("slow", 0.03)
    put(monkeypatch, slow)
    looks(running, [0, 1], defers=False)
    assert slow.num_looks == 2
    for rank in range(2):
        running.apply_record(
            RankEnded(attempt=0, rank=rank, time_ns=START_NS + 60 * S, reason="exit", exit_code=0)
        )
    looks(running, [2, 3])
    assert slow.num_looks == 4


def test_a_clock_that_is_set_back_keeps_no_detector_waiting(
    running: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Looking("slow", 0.03)
    put(monkeypatch, slow)
    looks(running, [3600, 3601])
    assert slow.num_looks == 1
    looks(running, [0])
    assert slow.num_looks == 2


def test_the_names_are_those_of_detectors() -> None:
    names = {detector.name for detector in state.DETECTORS}
    assert pacing.URGENT <= names
    assert pacing.PACE_THEMSELVES <= names
