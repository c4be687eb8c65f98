"""Programs that learn nothing, or on the wrong scale, on two ranks; and programs that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Watched
from tests.scenarios.launched import TORCHRUN, launch
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
SCRIPT = str(Path(__file__).with_name("learning_program.py"))
STEPS = 120
# Steps of a millisecond: else few of their numbers are written.
EACH_STEP = {"RANKSCOPE_NUMBERS_SECONDS": "1e-9", "RANKSCOPE_NUMBERS_BUDGET_RATIO": "1e9"}


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def said_of(run: Watched) -> list[dict[str, Any]]:
    """Return what is said of what is learnt once the run was looked at."""
    run.until(lambda: run.get()["run"]["step"] >= STEPS)
    run.until(lambda: run.get()["answer"]["state"] != "waiting")
    found = run.get("/findings")
    return [one for one in found["open"] + found["recovered"] if one["detector"] == "learning"]


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("one_class", "nothing_learnt", "no gradient reaches the weights"),
        ("twice", "accumulation", "divided by 3 twice"),
        ("never", "accumulation", "is not divided by 3"),
    ],
)
def test_programs_that_learn_wrongly(
    tmp_path: Path, server: ServerProcess, how: str, kind: str, words: str
) -> None:
    run = launch(server, tmp_path, *TORCHRUN, SCRIPT, how, **EACH_STEP)
    (finding,) = run.until(lambda: said_of(run))
    assert (finding["kind"], finding["severity"], finding["ranks"]) == (kind, "warning", [])
    assert words in finding["what"]
    assert run.get()["answer"]["state"] == "culprit"


@pytest.mark.parametrize("how", ["fit", "divided", "summed"])
def test_programs_that_learn(tmp_path: Path, server: ServerProcess, how: str) -> None:
    assert not said_of(launch(server, tmp_path, *TORCHRUN, SCRIPT, how, **EACH_STEP))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("no_gradient", "nothing_learnt"), ("divided_twice", "accumulation"),
     ("not_divided", "accumulation")],
)  # fmt: skip
def test_the_trainers_mistakes(
    tmp_path: Path, server: ServerProcess, fault: str, kind: str
) -> None:
    run = launch(
        server, tmp_path, *TORCHRUN, "-m", "rankscope_trainer", "--steps", "100", "--layers", "1",
        "--data-bytes", "65536", "--fault", f"{fault}:start=1",
    )  # fmt: skip
    verdict = run.until(lambda: run.get().get("verdict"))
    assert (verdict["kind"], verdict["ranks"]) == (kind, [])
