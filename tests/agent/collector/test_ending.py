from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.collector import ending
from rankscope.collector.ending import EndRules
from rankscope.ring import process_start_ticks


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rules(tmp_path: Path, clock: Clock) -> EndRules:
    return EndRules(tmp_path, clock)


def ends(rules: EndRules, *, alive: int = 0, ended: int = 0, at: float = 0, drained: bool) -> bool:
    rules.look()
    return rules.should_end(num_alive=alive, num_ended=ended, last_ended=at, is_drained=drained)


def launcher_is_there(directory: Path) -> None:
    pid = os.getpid()
    (directory / ending.LAUNCHER_PID).write_text(f"{pid} {process_start_ticks(pid)}")


def test_outlives_the_ranks_and_waits_for_the_next_attempt(rules: EndRules, clock: Clock) -> None:
    assert not ends(rules, alive=1, drained=True)
    clock.now += 500
    assert not ends(rules, ended=1, at=clock.now, drained=True)
    clock.now += ending.LINGER_SECONDS + 0.1
    assert ends(rules, ended=1, at=clock.now - 3.1, drained=True)
    assert not ends(rules, ended=1, at=clock.now - 3.1, drained=False)


def test_gives_up_on_a_server_that_stays_away(rules: EndRules, clock: Clock) -> None:
    at = clock.now
    clock.now += ending.GIVE_UP_SECONDS - 1
    assert not ends(rules, ended=1, at=at, drained=False)
    clock.now += 2
    assert ends(rules, ended=1, at=at, drained=False)


def test_no_rank_ever(rules: EndRules, clock: Clock) -> None:
    assert not ends(rules, drained=True)
    clock.now += ending.GIVE_UP_SECONDS + 1
    assert ends(rules, drained=True)


def test_stays_while_the_launcher_lives(rules: EndRules, clock: Clock, tmp_path: Path) -> None:
    launcher_is_there(tmp_path)
    clock.now += 10_000
    assert not ends(rules, ended=1, at=1, drained=True)
    (tmp_path / ending.LAUNCHER_PID).write_text(f"{os.getpid()} 1")  # the number of another one
    assert ends(rules, ended=1, at=1, drained=True)
    (tmp_path / ending.LAUNCHER_PID).write_text("noise")
    assert ends(rules, ended=1, at=1, drained=True)


def test_ends_soon_after_the_launcher_said_so(
    rules: EndRules, clock: Clock, tmp_path: Path
) -> None:
    launcher_is_there(tmp_path)
    (tmp_path / ending.FINISHED).touch()
    assert not ends(rules, drained=True)
    clock.now += 0.5
    assert not ends(rules, drained=False)
    assert not ends(rules, alive=1, drained=True)  # a rank that outlives the command
    assert ends(rules, drained=True)
    clock.now += ending.GIVE_UP_SECONDS
    assert ends(rules, drained=False)


def test_a_second_launch_of_the_same_run(rules: EndRules, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / ending.FINISHED).touch()
    assert not ends(rules, drained=True)
    clock.now += 5
    (tmp_path / ending.FINISHED).unlink()
    launcher_is_there(tmp_path)
    assert not ends(rules, drained=True)
