"""What dies, and what is known about it afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Watched, processes_of

pytestmark = pytest.mark.multiproc
# Steps of 0.1 s that sleep for most of it, with four buckets.
TRAINING = (
    "--layers", "2", "--layer-seconds", "0.016", "--width", "32", "--context", "32",
    "--data-bytes", "65536", "--bucket-mib", "0.035",
)  # fmt: skip


@pytest.mark.core
def test_a_killed_rank_is_known_within_five_seconds(watched: Watched) -> None:
    watched.start(2, *TRAINING, "--steps", "2000", "--log-every", "1")
    watched.until(lambda: watched.step() > 20)
    victim = next(rank for rank in watched.ranks() if rank["rank"] == 1)
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.time()

    def ended() -> Any:
        ranks = {rank["rank"]: rank for rank in watched.ranks()}
        return "SIGKILL" in (ranks[1]["exit_text"] or "") and ranks[1]

    rank = watched.until(ended, 10)
    seen_after = time.time() - killed
    assert seen_after < 5.0
    # its last collective and its last log line are from its last moments
    last = watched.get("/collectives/records?rank=1&limit=500")["rows"]
    latest_ms = max(record["arrived_ms"] for record in last)
    assert killed * 1e3 - latest_ms < 1500
    lines = watched.get("/logs?rank=1&stream=logging&limit=5")["lines"]
    assert killed * 1e3 - lines[0]["time_ms"] < 1500
    assert "step" in lines[0]["message"]
    assert rank["state"] == "failed"
    verdict = watched.until(lambda: watched.get().get("verdict"), 20)
    assert (verdict["kind"], verdict["ranks"]) == ("crash", [1])
    assert watched.process is not None
    assert watched.process.wait(60) != 0  # the launcher returns torchrun's own code


def test_ctrl_c_leaves_nothing_behind(watched: Watched, tmp_path: Path) -> None:
    watched.start(2, *TRAINING, "--steps", "2000")
    watched.until(lambda: watched.step() > 5)
    assert watched.process is not None
    os.killpg(watched.process.pid, signal.SIGINT)  # what a terminal does
    watched.process.wait(60)
    deadline = time.monotonic() + 15
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = [line for line in processes_of(tmp_path).values() if "rankscope_server" not in line]
    assert not left
    kinds = {finding["kind"] for finding in watched.get("/findings")["open"]}
    assert not kinds & {"hang", "slow_compute", "slow_data"}
    # and the next start does not trip over it
    again = Watched(watched.server, tmp_path, "again").start_forked(1, *TRAINING, "--steps", "3")
    assert again.process is not None
    assert again.process.wait(90) == 0, again.log.read_text()
    again.until(lambda: again.get().get("run", {}).get("status") == "ended", 20)


@pytest.mark.core
def test_server_killed_and_restarted_loses_nothing(watched: Watched) -> None:
    steps = 180
    port = watched.server.url.rpartition(":")[2]
    watched.start_forked(2, *TRAINING, "--steps", str(steps))
    for after in (15, 45):
        watched.until(lambda after=after: watched.step() > after)
        assert watched.process is not None
        assert watched.process.poll() is None, "it must train while its server is killed"
        watched.server.end(signal.SIGKILL)
        time.sleep(2.0)
        watched.server.flags = ("--port", port)
        watched.server.start()
    assert watched.process is not None
    assert watched.process.wait(200) == 0, watched.log.read_text()[-2000:]
    watched.until(lambda: watched.get().get("run", {}).get("status") == "ended", 30)
    for rank in (0, 1):
        per_step: dict[int, int] = {}
        for first in range(1, steps + 1, 50):
            path = f"/collectives/records?rank={rank}&from={first}&to={first + 49}&limit=1000"
            for record in watched.get(path)["rows"]:
                per_step[record["step"]] = per_step.get(record["step"], 0) + 1
        assert set(per_step) == set(range(1, steps + 1))
        steady = {count for step, count in per_step.items() if step > 2}
        assert steady == {4}  # four buckets a step, each there once
    assert watched.get()["coverage"]["losses"] == []


def test_server_absent_training_goes_on_and_data_arrives_later(watched: Watched) -> None:
    port = watched.server.url.rpartition(":")[2]
    watched.server.end(signal.SIGKILL)
    watched.start_forked(2, *TRAINING, "--steps", "40")
    assert watched.process is not None
    assert watched.process.wait(120) == 0, watched.log.read_text()[-2000:]
    assert "rankscope" in watched.log.read_text()  # it says that the server did not answer
    watched.server.flags = ("--port", port)
    watched.server.start()
    # the spool is sent by the collector that still waits, or by the next start of the same run
    watched.until(lambda: watched.step() >= 40, 60)
