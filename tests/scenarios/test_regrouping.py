"""Ranks die, stop, come and are left out: the others train on, and no window is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import api
from tests.scenarios.conftest import Watched
from tests.scenarios.regrouping import SMALL, RegroupingRun, compare
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run

pytestmark = pytest.mark.multiproc

FIXED = ("--batch-size", "2", "--global-batch", "12")
# A step takes a while, so that what is done to ranks falls into training.
SLOW = ("--layer-seconds", "0.01")
ENOUGH = ("--steps", "120")
Start = Callable[..., RegroupingRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start jobs that end with the test."""
    runs: list[RegroupingRun] = []

    def started(ranks: int, *arguments: str, **how: Any) -> RegroupingRun:
        runs.append(RegroupingRun(tmp_path / f"job-{len(runs)}", ranks, *arguments, **how))
        return runs[-1]

    yield started
    for run in runs:
        run.close()


def finished_right(run: RegroupingRun) -> None:
    assert run.finish() == 0, run.output()
    found = compare(run)
    assert found.is_right, f"{found}\n{run.output()}"


@pytest.mark.core
def test_killed_ranks_cost_a_step_and_one_that_stands_by_comes(start: Start) -> None:
    """More of it: `python benchmarks/regrouping.py`."""
    chooser = random.Random(1)
    run = start(3, *FIXED, *SLOW, *ENOUGH, launcher=["--standby", "1"])
    run.until_step(chooser.randrange(5, 15))
    victim = chooser.randrange(3)
    run.send(victim, signal.SIGKILL)
    run.until_ranks(*({0, 1, 2} - {victim}))
    run.until_ranks(0, 1, 2)
    other = chooser.choice(sorted({0, 1, 2} - {victim}))
    run.send(other, signal.SIGKILL)
    run.until_ranks(*({0, 1, 2} - {other}))
    finished_right(run)


def test_one_that_stops_is_left_out_and_let_in_when_it_goes_on(start: Start) -> None:
    run = start(3, *FIXED, *SLOW, "--steps", "250", patience_seconds=6.0)
    run.until_step(5)
    run.send(0, signal.SIGSTOP)  # the one that writes losses and checkpoints
    run.until_ranks(1, 2)
    run.send(0, signal.SIGCONT)
    run.until_ranks(0, 1, 2)
    finished_right(run)


def test_a_new_process_takes_over_weights_and_moments(start: Start, tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "10")
    run = start(2, *FIXED, *SLOW, *ENOUGH, *checkpoints, launcher=["--replace", "1"])
    run.until_step(12)
    run.send(1, signal.SIGKILL)
    run.until_ranks(0)
    run.until_ranks(0, 1)
    finished_right(run)
    again = start(1, *FIXED, "--steps", "125", *checkpoints)  # all of it from the newest one
    assert again.finish() == 0, again.output()
    assert sorted(again.trained()) == [121, 122, 123, 124, 125]


def test_a_ring_closes_around_the_one_that_is_lost(start: Start) -> None:
    run = start(3, "--strategy", "ring", "--batch-size", "2", *SLOW, "--steps", "60")
    run.until_step(5)
    run.send(2, signal.SIGKILL)
    run.until_ranks(0, 1)
    assert run.finish() == 0, run.output()
    trained, size = run.trained(), 2 * 2
    assert sorted(trained) == list(range(1, 61))
    windows = [
        window
        for line in run.lines()
        if "windows" in line and trained[line["step"]] == line["epoch"]
        for window in line["windows"]
    ]
    assert len(windows) == len(set(windows))  # less than an epoch is drawn
    before = sum(epoch == 1 for epoch in trained.values())
    assert len(windows) == size * (3 * before + 2 * (60 - before))


def test_parts_that_are_lost_come_from_another_replica(start: Start) -> None:
    """Two and two ranks, three in a row, two and two again, three in a row."""
    chooser = random.Random(2)
    flags = ("--strategy", "fsdp", "--replicas", "2", "--batch-size", "2", "--global-batch", "24")
    run = start(4, *flags, *SLOW, "--steps", "60", launcher=["--standby", "1"])
    run.until_step(chooser.randrange(3, 9))
    victim = chooser.randrange(4)
    run.send(victim, signal.SIGKILL)
    run.until_ranks(*({0, 1, 2, 3} - {victim}))
    run.until_ranks(0, 1, 2, 3)
    other = chooser.choice(sorted({0, 1, 2, 3} - {victim}))
    run.send(other, signal.SIGKILL)
    run.until_ranks(*({0, 1, 2, 3} - {other}))
    finished_right(run)


def test_where_all_that_hold_a_part_are_lost_the_others_say_which(
    start: Start, tmp_path: Path
) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "4")
    flags = ("--strategy", "fsdp", "--replicas", "2", "--batch-size", "2", "--global-batch", "24")
    run = start(4, *flags, *SLOW, "--steps", "1000", *checkpoints)
    run.until_step(9)
    for rank in (1, 3):  # the second of both rows
        run.send(rank, signal.SIGKILL)
    assert run.finish() == 128 + signal.SIGKILL, run.output()
    assert "what lost ranks alone have held is lost: part 1 of 2" in run.output()
    last = int(max((tmp_path / "checkpoints").glob("step-*[0-9]")).name[5:])
    again = start(2, *flags, "--steps", str(last + 4), *checkpoints)
    assert again.finish() == 0, again.output()
    assert sorted(again.trained()) == list(range(last + 1, last + 5))


def test_the_last_to_die_ends_the_job_as_failed(start: Start) -> None:
    run = start(2, *FIXED, *SLOW, "--steps", "100000")
    run.until_step(3)
    for rank in (0, 1):
        run.send(rank, signal.SIGKILL)
    assert run.finish() == 128 + signal.SIGKILL, run.output()


# --- watched, and advised


def test_the_run_that_is_watched_goes_on_and_names_the_lost_rank(watched: Watched) -> None:
    launcher = [sys.executable, "-m", "rankscope_trainer.regroup", "--ranks", "3", "--"]
    more = ("--regroup-seconds", "120", "--steps", "200", "--log-every", "20")
    watched.start_launcher(*launcher, *SMALL, *FIXED, *SLOW, *more)
    watched.until(lambda: watched.step() > 30)
    victim = next(rank for rank in watched.ranks() if rank["rank"] == 1)
    killed_in = watched.step()
    os.kill(victim["pid"], signal.SIGKILL)

    def lost() -> list[dict[str, Any]]:
        return [one for one in watched.get("/findings")["open"] if one["kind"] == "lost_rank"]

    (found,) = watched.until(lost, 60)
    assert (found["ranks"], found["severity"], found["victims"]) == ([1], "warning", [])
    assert abs(found["onset_step"] - killed_in) < 60
    assert "SIGKILL" in watched.until(lambda: lost()[0]["why"], 30)
    watched.until(lambda: watched.step() > killed_in + 40)
    run = watched.get()["run"]
    assert (run["status"], run["attempt"]) == ("running", 0)
    assert watched.process is not None
    assert watched.process.wait(200) == 0, watched.log.read_text()[-4000:]
    ended = watched.until(lambda: (r := watched.get()["run"])["status"] == "ended" and r, 60)
    assert ended["step"] == 200
    kinds = {one["kind"] for one in watched.get("/findings")["open"]}
    assert not kinds & {"crash", "hang", "desync", "failed_start", "replica_drift", "drift"}


@pytest.fixture(scope="module")
def advising(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("data"), "--look-seconds", "0.2").start()
    yield server
    server.close()


@pytest.mark.parametrize("obeys", [True, False])
def test_a_slow_rank_is_left_out_on_advice_where_it_is_to_be_obeyed(
    start: Start, advising: ServerProcess, obeys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server watches a run of 8 nodes, of which that of rank 2 is slow: its advice is real."""
    run_id = f"slow-{obeys}"
    monkeypatch.setenv("RANKSCOPE_SERVER", advising.url)
    monkeypatch.setenv("RANKSCOPE_RUN_ID", run_id)
    flags = ["--ask-advice", *(["--obey-advice"] if obeys else [])]
    run = start(3, *FIXED, *SLOW, "--steps", "100000", *flags)
    run.until_step(3)
    seed_run(
        advising.url, run_id=run_id, ranks=8, ranks_per_node=1, steps=300, slow_factor=2.0,
        end=False,
    )  # fmt: skip
    history = f"{advising.url}/api/v1/runs/{run_id}/advice/history"
    run.until(lambda: any(one["outcome"] for one in api.get(history).get("reports", ())))
    outcomes = [one["outcome"] for one in api.get(history)["reports"]]
    if obeys:
        run.until_ranks(0, 1)
        assert "leaves out ranks [2]" in run.output()
    else:
        assert "would leave out ranks [2]" in run.output()
        assert run.ranks_now() == [0, 1, 2]
    assert outcomes == ["done" if obeys else "ignored"]
    assert "rank 2 ended with" not in run.output()
