from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.files.journal import RECORD, JournalWriter
from rankscope.node import ending
from rankscope.node.ending import EndRules
from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.ranks.launchers import FINISHED, FOLDER, Launchers, own_directory
from rankscope.wire import schema


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rules(tmp_path: Path, clock: Clock) -> EndRules:
    return EndRules(Launchers(tmp_path, {}, Ledger()), clock)


def ends(rules: EndRules, *, alive: int = 0, ended: int = 0, at: float = 0, drained: bool) -> bool:
    rules.look()
    return rules.should_end(num_alive=alive, num_ended=ended, last_ended=at, is_drained=drained)


def launcher(run_directory: Path) -> Path:
    """Make this process a launcher."""
    directory = own_directory(run_directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


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
    own = launcher(tmp_path)
    (own.parent / "noise").mkdir()
    clock.now += 10_000
    assert not ends(rules, ended=1, at=1, drained=True)
    own.rename(own.with_suffix(".1"))  # the number of another one
    assert ends(rules, ended=1, at=1, drained=True)


def test_ends_soon_after_the_launcher_said_so(
    rules: EndRules, clock: Clock, tmp_path: Path
) -> None:
    (launcher(tmp_path) / FINISHED).touch()
    assert not ends(rules, drained=True)
    clock.now += 0.5
    assert not ends(rules, drained=False)
    assert not ends(rules, alive=1, drained=True)  # a rank that outlives the command
    assert ends(rules, drained=True)
    clock.now += ending.GIVE_UP_SECONDS
    assert ends(rules, drained=False)


def test_a_second_launch_of_the_same_run(rules: EndRules, clock: Clock, tmp_path: Path) -> None:
    first = tmp_path / FOLDER / "1.1"
    first.mkdir(parents=True)
    (first / FINISHED).touch()
    assert not ends(rules, drained=True)
    clock.now += 5
    second = launcher(tmp_path)
    assert not ends(rules, drained=True)
    (second / FINISHED).touch()
    assert not ends(rules, drained=True)
    clock.now += 0.5
    assert ends(rules, drained=True)


def test_several_launchers_are_followed_each(tmp_path: Path) -> None:
    texts: list[bytes] = []
    launchers = Launchers(tmp_path, {}, Ledger())
    assert launchers.read(texts.append)
    for name in ("1.1", "2.2"):
        (tmp_path / FOLDER / name).mkdir(parents=True)
        line = schema.LogLine(attempt=0, rank=0, time_ns=1, level=20, message=name)
        JournalWriter(tmp_path / FOLDER / name).append(RECORD, schema.encode(line))
    assert launchers.read(texts.append)
    assert [schema.decode_record(text).message for text in texts] == ["1.1", "2.2"]
    files = {}
    for key, follower in launchers.journals().items():
        follower.save(files.setdefault(key, RankOffsets()))
    assert Launchers(tmp_path, files, Ledger()).read(texts.append)
    assert len(texts) == 2
