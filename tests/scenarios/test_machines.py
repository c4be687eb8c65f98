"""A real run on this machine: what the page of machines says of it."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import sys
import time
from typing import Any

import pytest

from tests.scenarios.conftest import Watched, processes_of

pytestmark = pytest.mark.multiproc
# Steps of 0.05 s that sleep for most of it, without an end.
TRAINING = (
    "--layers", "2", "--layer-seconds", "0.004", "--width", "32", "--context", "32",
    "--steps", "100000",
)  # fmt: skip


def values(one: dict[str, Any]) -> list[float]:
    return [value for value in one["max"] if value is not None]


@pytest.mark.quick
def test_a_run_tells_what_its_machine_does(watched: Watched) -> None:
    watched.start_forked(2, *TRAINING)
    host = socket.gethostname()

    def sampled() -> Any:
        """The processes of both ranks, once each has a rate."""
        path = f"/samples?kind=process&host={host}&names=user_us_total,rss_bytes"
        series = watched.get(path).get("series", [])
        return len(series) == 4 and all(values(one) for one in series) and series

    series = watched.until(sampled)
    ranks = {rank["rank"]: rank for rank in watched.ranks()}
    assert {one["label"] for one in series} == {
        f"rank {number}, pid {rank['pid']}" for number, rank in ranks.items()
    }
    for one in series:
        low, high = (50e6, 5e9) if one["unit"] == "bytes" else (0, 64)
        assert all(low <= value <= high for value in values(one)), one
    page = watched.get("/machines")
    (machine,) = page["machines"]
    assert (machine["host"], machine["ranks"]) == (host, [0, 1])
    sources = {one["source"]: one for one in machine["sources"]}
    assert sources["host"]["state"] == "works"
    assert all(one["reason"] for one in sources.values() if one["state"] == "skipped")

    def used() -> Any:
        """The machine's own, once three intervals give a rate that no late look spoils."""
        path = "/samples?kind=host&names=cpu_user_us_total,memory_used_bytes"
        series = sorted(watched.get(path)["series"], key=lambda one: str(one["unit"]), reverse=True)
        return len(series) == 2 and all(len(values(one)) >= 3 for one in series) and series

    cpu, memory = watched.until(used)
    assert (cpu["unit"], memory["unit"]) == ("ratio", "bytes")
    assert 0 < statistics.median(values(cpu)) <= 1.05
    assert min(values(memory)) > 1 << 20


def test_ranks_that_are_paused_with_their_collector_are_named_as_stopped(watched: Watched) -> None:
    """All processes of the job are stopped for 6 s, as `docker pause` does it."""
    watched.start(2, *TRAINING, PYTHON_EXEC=sys.executable)  # found by their command lines
    watched.until(lambda: watched.step() > 100)
    processes = processes_of(watched.directory)
    stopped = [pid for pid, line in processes.items() if "rankscope_server" not in line]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)

    def found() -> Any:
        findings = watched.get("/findings").get("open", [])
        return next((one for one in findings if one["kind"] == "stopped_process"), None)

    pause = watched.until(found, 20)
    assert pause["ranks"] == [0, 1]
    assert "were paused for" in pause["what"]
    assert pause["cost_throughput_ratio"] == pytest.approx(6 / 30, abs=0.08)
    step = watched.step()
    watched.until(lambda: watched.step() > step + 20)  # and it goes on
