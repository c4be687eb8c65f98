"""Mistakes of beginners on real ranks: each is advised, with its cost, and none is "healthy"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scenarios.conftest import Watched
from tests.server.conftest import ServerProcess

PROGRAMS = Path(__file__).parent / "mistakes"

pytestmark = [pytest.mark.multiproc, pytest.mark.quiet]


@pytest.fixture
def run(shared_server: ServerProcess, tmp_path: Path) -> Iterator[Watched]:
    """A run of its own on the server of this module."""
    watched = Watched(shared_server, tmp_path, tmp_path.name)
    yield watched
    watched.stop()


def answer_of(run: Watched) -> dict[str, Any]:
    """Return the first sentence once the run is over."""
    run.until(lambda: run.get().get("run", {}).get("status") == "ended")
    answer: dict[str, Any] = run.get()["answer"]
    return answer


def findings_of(run: Watched, kind: str) -> list[dict[str, Any]]:
    return [one for one in run.get("/findings")["open"] if one["kind"] == kind]


def test_a_model_on_two_ranks_without_a_pipeline_is_advised_to_pipeline(run: Watched) -> None:
    run.start_forked(2, "--strategy", "model_parallel", "--steps", "60", "--layer-seconds", "0.004")
    answer = answer_of(run)
    (finding,) = findings_of(run, "no_pipelining")
    assert answer["state"] == "advice"
    assert answer["text"].endswith(finding["what"])
    assert "2 stages work one after the other (1 microbatch)" in finding["what"]
    assert finding["cost_throughput_ratio"] == pytest.approx(0.5, abs=0.05)
    assert "4 would idle 20 % of a step, 8 11 %" in finding["next"]
    assert run.get("/parallelism")["mesh"]["stage"] == [0, 1]


def test_so_is_a_script_that_says_nothing_of_its_stages(run: Watched) -> None:
    run.start_script(2, str(PROGRAMS / "two_stages.py"))
    answer = answer_of(run)
    (finding,) = findings_of(run, "no_pipelining")
    assert (answer["state"], finding["severity"]) == ("advice", "info")
    assert "Stages in their order: rank 0, then rank 1" in [
        fact["text"] for fact in finding["evidence"]
    ]
    assert run.get("/parallelism")["mesh"]["stage"] == [0, 1]
    parts = {part["name"]: part["share"] for part in run.get("/cost")["parts"]}
    assert parts["bubble"] > 2 * (parts.get("waiting", 0.0) + parts["communication"])


@pytest.mark.parametrize("pattern", ["ring", "halo"])
def test_ranks_that_exchange_with_their_neighbours_are_no_pipeline(
    run: Watched, pattern: str
) -> None:
    run.start_script(2, str(PROGRAMS / "neighbours.py"), pattern)
    answer_of(run)
    assert not findings_of(run, "no_pipelining")
    found = run.get("/parallelism")
    assert (found["pipeline"], found["mesh"]["stage"]) == (None, [None, None])


@pytest.mark.parametrize("exchange", ["messages", "calls"])
def test_a_parameter_server_that_all_workers_wait_for_is_advised_against(
    run: Watched, exchange: str
) -> None:
    run.start_forked(
        4, "--strategy", "parameter_server", "--exchange", exchange,
        "--steps", "40", "--layers", "2", "--width", "256", "--context", "16",
        "--batch-size", "1", "--microbatches", "1", "--layer-seconds", "0.004",
    )  # fmt: skip
    answer = answer_of(run)
    (finding,) = findings_of(run, "server_bottleneck")
    assert answer["state"] == "advice"
    assert "for 1 parameter server" in finding["what"]
    spared = spared_share(run)
    assert finding["cost_throughput_ratio"] == pytest.approx(spared, abs=0.05)
    assert "2 servers with even shards" in finding["next"]
    assert any("gradients wait" in fact["text"] for fact in finding["evidence"])
    assert not [one for one in run.get("/findings")["open"] if 3 in one["ranks"]]


def spared_share(run: Watched) -> float:
    """Return which share of its step the worker waits that waits least, by the trainer's clock."""
    series = run.get("/metrics?names=waited_seconds&width=1000")["series"]
    waits = np.array([one["value"] for one in series], float)[:, 10:]
    steps = run.get("/parallelism")["mesh"]["values"]
    step_ms = next(value["values"] for value in steps if value["key"] == "step_ms")
    return float(np.median(waits.min(0)) / (np.median(step_ms[:3]) / 1e3))
