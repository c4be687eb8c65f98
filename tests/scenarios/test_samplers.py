"""Programs that draw samples as tutorials do, on two ranks: mistakes are named, others not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Watched
from tests.scenarios.launched import TORCHRUN, launch
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
SCRIPT = str(Path(__file__).with_name("sampled_program.py"))
# Steps of a millisecond: else few of their numbers are written.
EACH_STEP = {"RANKSCOPE_NUMBERS_SECONDS": "1e-9", "RANKSCOPE_NUMBERS_BUDGET_RATIO": "1e9"}


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def said_of(run: Watched, steps: int) -> list[dict[str, Any]]:
    """Return what is said of the samples once all steps were looked at."""
    run.until(lambda: run.get()["run"]["step"] >= steps)
    run.until(lambda: run.get()["answer"]["state"] != "waiting")
    found = run.get("/findings")
    return [one for one in found["open"] + found["recovered"] if one["kind"].startswith("same_")]


@pytest.mark.parametrize("how", ["forgotten", "by_hand"])
def test_ranks_that_train_on_the_same_samples(
    tmp_path: Path, server: ServerProcess, how: str
) -> None:
    run = launch(server, tmp_path, *TORCHRUN, SCRIPT, how, **EACH_STEP)
    verdict = run.until(lambda: run.get().get("verdict"))
    assert (verdict["kind"], verdict["severity"], verdict["ranks"]) == (
        "same_samples", "critical", [],
    )  # fmt: skip
    assert "Both ranks train on the same samples" in run.get()["answer"]["text"]


def test_a_sampler_whose_epoch_is_never_set(tmp_path: Path, server: ServerProcess) -> None:
    run = launch(server, tmp_path, *TORCHRUN, SCRIPT, "epoch", **EACH_STEP)
    (finding,) = run.until(lambda: said_of(run, 48))
    assert (finding["kind"], finding["severity"]) == ("same_order", "warning")


@pytest.mark.parametrize("how", ["sampler", "stream", "validated"])
def test_programs_that_share_their_samples_out(
    tmp_path: Path, server: ServerProcess, how: str
) -> None:
    run = launch(server, tmp_path, *TORCHRUN, SCRIPT, how, **EACH_STEP)
    assert not said_of(run, 48)


def test_ranks_that_share_a_sequence_are_not_accused(tmp_path: Path, server: ServerProcess) -> None:
    run = launch(server, tmp_path, *TORCHRUN, SCRIPT, "sequence", **EACH_STEP)
    assert {one["severity"] for one in said_of(run, 96)} == {"info"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("forgotten_sampler", "same_samples"), ("forgotten_set_epoch", "same_order")],
)
def test_the_trainers_mistakes(
    tmp_path: Path, server: ServerProcess, fault: str, kind: str
) -> None:
    run = launch(
        server, tmp_path, *TORCHRUN, "-m", "rankscope_trainer", "--steps", "40", "--layers", "2",
        "--data-bytes", "16384", "--fault", f"{fault}:start=1",
    )  # fmt: skip
    verdict = run.until(lambda: run.get().get("verdict"))
    assert (verdict["kind"], verdict["ranks"]) == (kind, [])
