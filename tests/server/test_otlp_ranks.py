"""Real processes with the SDK of OpenTelemetry: who is slow is known, and the server says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import ServerProcess, wait_until

PROGRAM = Path(__file__).with_name("otel_program.py")
SECRET = "aB3dE6gH9jK2mN5p"


class Job:
    """A job that has ended, and what the server says of it."""

    def __init__(self, server: ServerProcess, run_id: str, *arguments: str) -> None:
        self.server, self.run_id = server, run_id
        command = [sys.executable, str(PROGRAM), server.url, run_id, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        wait_until(lambda: self.get("")["run"]["status"] in ("ended", "failed"))

    def get(self, path: str) -> Any:
        address = f"{self.server.url}/api/v1/runs/{self.run_id}{path}"
        reply = httpx.get(address, trust_env=False, timeout=30)
        reply.raise_for_status()
        return reply.json()

    def answered(self, words: str) -> dict[str, Any]:
        """Return the answer of the last look: the end is seen a moment before it."""
        wait_until(lambda: words in self.get("")["run"]["answer"]["text"])
        answer: dict[str, Any] = self.get("")["answer"]
        return answer

    def reasons(self) -> dict[str, tuple[str, str]]:
        detectors = self.get("/findings")["detectors"]
        return {one["name"]: (one["reason"], one["remedy"]) for one in detectors}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("spans")).start()
    yield server
    server.close()


@pytest.fixture
def job(server: ServerProcess, request: pytest.FixtureRequest) -> Callable[..., Job]:
    return lambda *arguments: Job(server, request.node.name, *arguments)


@pytest.mark.core
def test_the_slow_rank_is_named(job: Callable[..., Job]) -> None:
    run = job("--slow", "2")
    answer = run.answered("slower")
    assert answer["text"].startswith(
        "Rank 2 on node-1 is 1.2\N{MULTIPLICATION SIGN} slower than its 3"
    )
    assert "in forward" in answer["detail"]
    (finding,) = run.get("/findings")["open"]
    assert (finding["kind"], finding["ranks"]) == ("slow_compute", [2])
    # 30 ms of about 220: all others wait for them
    assert finding["cost_throughput_ratio"] == pytest.approx(30 / 220, abs=0.01)
    summary = run.get("")
    assert (summary["run"]["step"], summary["coverage"]["reporting"]) == (200, 4)
    assert summary["coverage"]["missing_batches"] == 0
    cell = run.get("/cell?rank=2&step=100")
    phases = {"data": 2, "forward": 90, "backward": 100, "optimizer": 20, "other": 0}
    for phase, length_ms in phases.items():
        assert cell["phases"][phase] == pytest.approx(length_ms, rel=0.05), phase
    assert cell["blocked_ms"] == pytest.approx(8, rel=0.3)  # the last to come does not wait
    assert run.get("/cell?rank=0&step=100")["blocked_ms"] == pytest.approx(38, rel=0.15)


def test_what_is_beside_spans_is_found_too(job: Callable[..., Job]) -> None:
    run = job("--steps", "30")
    lines = run.get("/logs?limit=100")["lines"]
    (begin, *_) = [one for one in lines if "training begins" in one["message"]]
    assert (begin["level"], begin["logger"], begin["step"]) == ("WARNING", "trainer.setup", 1)
    assert begin["fields"]["trace_id"] == "00000000000000000000000000001234"
    (other, *_) = [one for one in lines if "tidying up" in one["message"]]
    assert other["message"] == "span tidying up: 5.000 ms"
    assert SECRET not in str(lines)
    numbers = run.get("/metrics")
    assert numbers["names"] == ["loss", "message.size.count", "message.size.mean"]
    losses = [one for one in numbers["series"] if one["name"] == "loss"]
    assert [one["rank"] for one in losses] == [0, 1, 2, 3]
    assert losses[3]["value"] == [pytest.approx(1 / step) for step in range(1, 11)]
    checkpoints = [one for one in lines if one["message"] == "checkpoint"]
    assert {one["fields"]["seconds"] for one in checkpoints} == {"0.900000"}


def test_a_healthy_job_has_no_finding(job: Callable[..., Job]) -> None:
    run = job()
    answer = run.answered("Healthy")
    assert answer["text"].startswith("Healthy: 4 ranks, 200 steps")
    assert "hang" in answer["detail"]  # what spans cannot show is said
    assert not run.get("/findings")["open"]


def test_without_spans_of_waits_it_is_said_what_lacks(job: Callable[..., Job]) -> None:
    run = job("--slow", "2", "--style", "no-waits")
    answer = run.answered("No verdict: straggler")
    assert "whose waits are known, has 0" in answer["text"]
    assert "make a span of each collective" in run.reasons()["straggler"][1]
    assert not run.get("/findings")["open"]
    assert run.get("/cell?rank=2&step=100")["own_work_ms"] is None


def test_a_program_without_spans_of_steps(job: Callable[..., Job]) -> None:
    """Steps end with the optimizer, as what wraps PyTorch's own functions says it."""
    run = job("--slow", "1", "--style", "updates")
    assert run.answered("slower")["text"].startswith(
        "Rank 1 on node-0 is 1.2\N{MULTIPLICATION SIGN}"
    )
    assert run.get("")["run"]["step"] == 200


def test_the_logger_of_nvidia(job: Callable[..., Job]) -> None:
    """Its steps and phases are there, by its own exporter; it has no span of what ranks wait in."""
    run = job("--slow", "3", "--style", "one-logger", "--steps", "60")
    run.answered("No verdict: straggler")
    assert run.get("")["run"]["step"] == 60
    assert run.get("/cell?rank=3&step=30")["phases"]["forward"] == pytest.approx(90, rel=0.05)
    assert run.get("/cell?rank=0&step=30")["phases"]["forward"] == pytest.approx(60, rel=0.05)
    assert "collective" in run.reasons()["straggler"][1]


def test_a_rank_that_failed_is_named(job: Callable[..., Job]) -> None:
    run = job("--fails", "1", "--steps", "40")
    answer = run.answered("MemoryError")
    assert answer["text"] == "Rank 1 on node-0 raised MemoryError: CUDA out of memory"
    assert run.get("")["run"]["status"] == "failed"


def test_what_a_server_sends_another_one_takes(server: ServerProcess) -> None:
    """A channel of alerts that leads to a server's own address: its messages are lines there."""
    target = {"kind": "otlp", "url": server.url}
    with httpx.Client(base_url=f"{server.url}/api/v1", trust_env=False, timeout=30) as client:
        made = client.post("/alerts/channels", json={"name": "logs", "target": target})
        assert made.status_code == 200, made.text
        tried = client.post(f"/alerts/channels/{made.json()['id']}/test")
        assert tried.status_code == 200, tried.text
        wait_until(lambda: client.get("/runs/rankscope").status_code == 200)
        (line,) = client.get("/runs/rankscope/logs", params={"limit": 5}).json()["lines"]
        assert (line["logger"], line["fields"]["rankscope.event"]) == ("rankscope.alerts", "test")
