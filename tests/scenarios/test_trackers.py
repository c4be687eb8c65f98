"""Real trackers beside a real run: each is read back by its own reader, and linked both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.others import PYTHON, read_tracker
from tests.scenarios import tracked
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import launch
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("others")]
SCRIPT = str(Path(tracked.__file__))


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def store_of(tracker: str, folder: Path) -> str:
    """Return where the tracker of a run in this folder keeps what it is given."""
    return {
        "mlflow": f"sqlite:///{folder}/mlflow.db",
        "wandb": str(folder / "wandb"),
        "tensorboard": str(folder / "board"),
        "trackio": str(folder / "trackio"),
        "swanlab": str(folder / "swanlog"),
        "comet": str(folder / "comet"),
    }[tracker]


def variables_of(tracker: str, folder: Path) -> dict[str, str]:
    """Return what keeps a tracker on this machine, as its documents say."""
    return {
        "mlflow": {"MLFLOW_TRACKING_URI": store_of(tracker, folder)},
        "wandb": {"WANDB_MODE": "offline"},
        "trackio": {"TRACKIO_DIR": store_of(tracker, folder)},
    }.get(tracker, {})


def run_tracked(server: ServerProcess, folder: Path, tracker: str) -> Watched:
    """Train with a tracker, written to from begin to end; return the run."""
    attach = (PYTHON, "-m", "rankscope", "run", "--track", tracker, "--")
    variables = variables_of(tracker, folder)
    return launch(server, folder, PYTHON, SCRIPT, tracker, attach=attach, **variables)


def read(tracker: str, folder: Path) -> dict[str, Any]:
    """Return the runs of the tracker by their names."""
    return read_tracker(tracker, store_of(tracker, folder))


def is_whole(numbers: dict[str, Any], run: Watched) -> None:
    """All steps are there once, with what the server says of them."""
    rows = run.get("/steps")["steps"]
    assert [row["step"] for row in rows] == list(range(1, tracked.STEPS + 1))
    for name in ("step_ms", "slowest_rank"):
        written = {step: value for step, value in numbers[f"rankscope/{name}"]}
        assert len(written) == len(numbers[f"rankscope/{name}"])
        known = {row["step"]: row[name] for row in rows if row[name] is not None}
        assert written == pytest.approx(known, rel=1e-6)


def link_of(run: Watched, tracker: str) -> dict[str, Any]:
    (link,) = run.get()["trackers"]
    assert (link["tracker"], link["rank"]) == (tracker, 0)
    found: dict[str, Any] = link
    return found


def test_mlflow(tmp_path: Path, server: ServerProcess) -> None:
    """Numbers, verdict and link are in the script's own run."""
    run = run_tracked(server, tmp_path, "mlflow")
    ((name, own),) = read("mlflow", tmp_path).items()
    assert name == "owl"
    assert [step for step, _ in own["numbers"]["loss"]] == list(range(1, tracked.STEPS + 1))
    is_whole(own["numbers"], run)
    answer = run.get()["answer"]["text"]
    texts = own["texts"]
    assert texts["rankscope.page"] == f"{server.url}/runs/{run.run_id}"
    assert (texts["rankscope.answer"], texts["rankscope.status"]) == (answer, "ended")
    assert texts["state"] == "FINISHED"  # as the script left it
    link = link_of(run, "mlflow")
    assert (link["run"], link["name"], link["store"]) == (
        own["id"], "owl", store_of("mlflow", tmp_path),
    )  # fmt: skip


def test_wandb(tmp_path: Path, server: ServerProcess) -> None:
    """A run of its own beside the script's, which has the link."""
    run = run_tracked(server, tmp_path, "wandb")
    runs = read("wandb", tmp_path)
    own, beside = runs["owl"], runs["owl (rankscope)"]
    page = f"{server.url}/runs/{run.run_id}"
    assert own["texts"]["config"] == page
    assert beside["texts"]["config"] == {"run": run.run_id, "page": page, "of": own["id"]}
    assert beside["texts"]["project"] == own["texts"]["project"] == "characters"
    is_whole(beside["numbers"], run)
    assert beside["texts"]["rankscope/answer"] == run.get()["answer"]["text"]
    link = link_of(run, "wandb")
    assert (link["run"], link["project"], link["mode"]) == (own["id"], "characters", "offline")


def test_tensorboard(tmp_path: Path, server: ServerProcess) -> None:
    """A folder in that of the script's writer: TensorBoard shows it as a run."""
    run = run_tracked(server, tmp_path, "tensorboard")
    runs = read("tensorboard", tmp_path)
    assert sorted(runs) == ["owl", "owl/rankscope"]
    assert len(runs["owl"]["numbers"]["loss"]) == tracked.STEPS
    is_whole(runs["owl/rankscope"]["numbers"], run)
    said = runs["owl/rankscope"]["texts"]["rankscope/verdict"]
    assert run.get()["answer"]["text"] in said
    assert f"({server.url}/runs/{run.run_id})" in said
    assert link_of(run, "tensorboard")["store"] == str(tmp_path / "board" / "owl")


def test_trackio(tmp_path: Path, server: ServerProcess) -> None:
    """A run of its own in the same project."""
    run = run_tracked(server, tmp_path, "trackio")
    runs = read("trackio", tmp_path)
    own, beside = runs["owl"], runs["owl (rankscope)"]
    assert beside["texts"]["config"]["of"] == own["id"]
    is_whole(beside["numbers"], run)
    assert link_of(run, "trackio")["project"] == "characters"


def test_swanlab(tmp_path: Path, server: ServerProcess) -> None:
    """An experiment of its own beside the script's."""
    run = run_tracked(server, tmp_path, "swanlab")
    runs = read("swanlab", tmp_path)
    own, beside = runs["owl"], runs["owl (rankscope)"]
    page = f"{server.url}/runs/{run.run_id}"
    assert beside["texts"]["config"] == {"run": run.run_id, "page": page, "of": own["id"]}
    is_whole(beside["numbers"], run)
    assert any(run.get()["answer"]["text"] in text for text in beside["texts"]["written"])
    link = link_of(run, "swanlab")
    assert (link["run"], link["name"], link["mode"]) == (own["id"], "owl", "offline")


def test_comet(tmp_path: Path, server: ServerProcess) -> None:
    """An experiment of its own in the same project."""
    run = run_tracked(server, tmp_path, "comet")
    runs = read("comet", tmp_path)
    own = runs["owl"]
    (beside,) = (found for found in runs.values() if found is not own)
    assert beside["texts"]["project"] == own["texts"]["project"] == "characters"
    assert beside["texts"]["rankscope/of"] == own["id"]
    assert beside["texts"]["rankscope/page"] == f"{server.url}/runs/{run.run_id}"
    assert beside["texts"]["rankscope/answer"] == run.get()["answer"]["text"]
    is_whole(beside["numbers"], run)
    link = link_of(run, "comet")
    assert (link["run"], link["project"], link["mode"]) == (own["id"], "characters", "offline")
