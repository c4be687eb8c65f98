"""`rankscope track`: what it writes of a run that is over or live, and what becomes of mistakes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.storage import StorageFailed
from rankscope.cli.track import RunSource, conclusion_of, is_written
from tests.api import get
from tests.others import PYTHON, read_tracker
from tests.ports import free_port
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run, wait_until_judged

STEPS = 120
SLOW, WELL = "slow", "well"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("tracked")).start()
    seed_run(server.url, run_id=SLOW, ranks=4, steps=STEPS, slow_rank=2, slow_from=20)
    seed_run(server.url, run_id=WELL, ranks=2, steps=60, fault="none")
    wait_until_judged(server.url)
    yield server
    server.close()


def track(
    *arguments: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    command = [PYTHON, "-m", "rankscope", "track", *arguments]
    return subprocess.run(
        command, env=kept | environ, capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.mark.needs("others")
def test_a_run_that_is_over(server: ServerProcess, tmp_path: Path) -> None:
    """Once more it replaces what was there."""
    for _ in range(2):
        done = track(SLOW, "--to", "tensorboard", "--store", str(tmp_path), "--json",
                     "--server", server.url)  # fmt: skip
        assert done.returncode == 0, done.stderr
    (written,) = json.loads(done.stdout)["written"]
    assert written == {"tracker": "tensorboard", "place": str(tmp_path / "rankscope")}
    assert written["place"] in done.stderr
    found = read_tracker("tensorboard", str(tmp_path))["rankscope"]["numbers"]
    assert [step for step, _ in found["rankscope/step_ms"]] == list(range(1, STEPS + 1))
    late = [value for step, value in found["rankscope/slowest_rank"] if step > 40]
    assert set(late) == {2.0}
    verdict = get(f"{server.url}/api/v1/runs/{SLOW}")["verdict"]
    [[step, lost]] = found["rankscope/lost_throughput_ratio"]
    assert (step, lost) == (STEPS, pytest.approx(verdict["cost_throughput_ratio"]))


@pytest.mark.needs("others")
def test_one_tracker_that_fails_leaves_the_others(server: ServerProcess, tmp_path: Path) -> None:
    done = track(WELL, "--to", "mlflow", "--to", "tensorboard", "--server", server.url,
                 MLFLOW_RUN_ID="no-such", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/m.db",
                 cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "MLflow: Run with id=no-such not found" in done.stderr
    assert f"TensorBoard: {tmp_path / 'runs' / WELL}" in done.stderr


@pytest.mark.needs("others")
def test_mistakes(server: ServerProcess, tmp_path: Path) -> None:
    two = track(SLOW, "--to", "mlflow", "--to", "wandb", "--store", "x", "--server", server.url)
    assert (two.returncode, "of one tracker" in two.stderr) == (64, True)
    unknown = track(SLOW, "--to", "paper", "--server", server.url)
    assert (unknown.returncode, "tensorboard" in unknown.stderr) == (64, True)
    lost = track("no-such", "--to", "tensorboard", "--server", server.url)
    assert (lost.returncode, "no run 'no-such'" in lost.stderr) == (2, True)
    away = track(SLOW, "--to", "tensorboard", "--server", f"127.0.0.1:{free_port()}")
    assert (away.returncode, "does not answer" in away.stderr) == (2, True)
    nowhere = track(SLOW, "--to", "tensorboard", "--store", str(tmp_path / "none"),
                    "--server", server.url)  # fmt: skip
    assert (nowhere.returncode, "there is no folder" in nowhere.stderr) == (1, True)


def test_of_very_many_steps_fewer_and_fewer_are_written() -> None:
    assert all(is_written(step) for step in range(1, 10_001))
    counts = [
        sum(is_written(step) for step in range(begin, begin + 10_000))
        for begin in (10_001, 20_001, 30_001, 70_001, 150_001)
    ]
    assert counts == [5_000, 2_500, 2_500, 1_250, 625]


class Answers:
    """A server that says these things, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self._answers, self.asked = list(answers), list[str]()

    def ask(self, _method: str, path: str) -> dict[str, Any]:
        self.asked.append(path)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, Any] = answer
        return found


def page(status: str) -> dict[str, Any]:
    return {"run": {"status": status}}


def source(answers: Answers) -> RunSource:
    return RunSource(answers, "run", sleep=lambda _: None)  # type: ignore[arg-type]


def test_a_run_that_is_not_there_yet_and_a_server_that_starts_again_are_waited_for() -> None:
    answers = Answers(
        StorageFailed("404", 404), page("running"), StorageFailed("away"), page("ended")
    )
    seen = [look["run"]["status"] for look in source(answers).looks(follow=True)]
    assert seen == ["running", "ended"]
    with pytest.raises(StorageFailed, match="410"):
        list(source(Answers(StorageFailed("410", 410))).looks(follow=True))
    with pytest.raises(StorageFailed, match="404"):
        list(source(Answers(StorageFailed("404", 404))).looks(follow=False))


def row(step: int, num_ranks: int) -> dict[str, Any]:
    known = {"step_ms": 10.0 * step, "waiting_ratio": None, "slowest_rank": 1, "slowest_ratio": 1.5}
    return {"step": step, "num_ranks": num_ranks, "time_ms": 1e12, **known}


def part(*rows: dict[str, Any], last: int, following: int | None = None) -> dict[str, Any]:
    return {"num_expected": 2, "last_step": last, "steps": list(rows), "next_step": following}


def test_a_step_is_written_once_all_ranks_have_sent_it() -> None:
    answers = Answers(
        part(row(1, 2), following=2, last=4), part(row(2, 2), row(3, 1), row(4, 2), last=4),
        part(row(3, 2), row(4, 2), last=4), part(row(5, 1), row(30, 1), last=30),
        part(row(30, 1), last=30),
    )  # fmt: skip
    reading = source(answers)
    seen = [
        [one.step for steps in reading.new_steps(is_over=is_over) for one in steps]
        for is_over in (False, False, False, True)
    ]
    assert seen == [[1, 2], [3, 4], [5], [30]]  # 5 is so old that it stays without one
    assert [path.rpartition("=")[2] for path in answers.asked] == ["1", "2", "3", "5", "6"]


def test_what_is_not_known_is_not_written() -> None:
    ((one,),) = source(Answers(part(row(1, 2), last=1))).new_steps(is_over=True)
    assert one.values == {
        "rankscope/step_ms": 10.0, "rankscope/slowest_rank": 1.0, "rankscope/slowest_ratio": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "verdict", "lost"),
    [("healthy", None, 0.0), ("unknown", None, None), ("waiting", None, None),
     ("culprit", {"kind": "slow_compute", "cost_throughput_ratio": 0.2}, 0.2),
     ("culprit", {"kind": "crash", "cost_throughput_ratio": None}, None)],
)  # fmt: skip
def test_nothing_is_lost_only_where_all_is_well(
    state: str, verdict: dict[str, Any] | None, lost: float | None
) -> None:
    run = {"step": 7, "status": "running", "last_seen_ms": None}
    found = conclusion_of({"run": run, "verdict": verdict, "answer": {"state": state, "text": "x"}})
    assert found.numbers() == ({} if lost is None else {"rankscope/lost_throughput_ratio": lost})
