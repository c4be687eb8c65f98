"""Mistakes about learning rate, batch and accumulation in programs that know nothing of Rankscope.

nanoGPT as it is published, a Trainer of Hugging Face, and a plain loop, on two ranks.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.programs import BY_NAME, PROGRAMS
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import TORCHRUN, launch
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
MISTAKES = Path(__file__).parent / "mistakes"
# Steps of a millisecond: else few of their numbers are written.
EACH_STEP = {"RANKSCOPE_NUMBERS_SECONDS": "1e-9", "RANKSCOPE_NUMBERS_BUDGET_RATIO": "1e9"}
DIVISION = "loss = loss / gradient_accumulation_steps"
NANOGPT = ("--max_iters=60", "--block_size=8", "--n_layer=1", "--n_head=2", "--n_embd=32")


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def said_of(run: Watched, steps: int) -> list[dict[str, Any]]:
    """Return what is said of what is learnt once all steps were looked at."""
    run.until(lambda: run.get()["run"]["step"] >= steps)
    run.until(lambda: run.get()["answer"]["state"] != "waiting")
    found = run.get("/findings")
    return [one for one in found["open"] + found["recovered"] if one["detector"] == "learning"]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ((), None),
        (("--scale", "linear"), "linear_scaling"),
        (("--scale", "root"), None),
        (("--scale", "linear", "--optimizer", "SGD"), None),
        (("--batch-size", "512", "--epochs", "2"), "no_warm_up"),
        (("--batch-size", "512", "--epochs", "2", "--warm-up", "20"), None),
        (("--batch-size", "512", "--epochs", "2", "--warm-up", "20", "--scale", "linear"),
         "linear_scaling"),
    ],
    ids=["clean", "linear", "root", "SGD", "no warm-up", "warm-up", "linear with warm-up"],
)  # fmt: skip
def test_a_plain_loop(
    tmp_path: Path, server: ServerProcess, more: tuple[str, ...], kind: str | None
) -> None:
    command = (*TORCHRUN, str(MISTAKES / "own_loop.py"), "--lr", "1e-3", *more)
    run = launch(server, tmp_path, *command, **EACH_STEP)
    assert [one["kind"] for one in said_of(run, 64)] == ([] if kind is None else [kind])


@pytest.mark.skipif(not PROGRAMS.exists(), reason="the open programs are not there")
@pytest.mark.parametrize(
    ("old", "new", "flags", "kind"),
    [
        (DIVISION, DIVISION, (), None),
        (DIVISION, f"{DIVISION} / gradient_accumulation_steps", (), "accumulation"),
        (DIVISION, "loss = loss", (), "accumulation"),
        (DIVISION, f"{DIVISION} * 0", (), "nothing_learnt"),
        (DIVISION, DIVISION, ("--batch_size=256", "--decay_lr=False"), "no_warm_up"),
        ("ddp_local_rank = int", "learning_rate *= int(os.environ['WORLD_SIZE'])\n"
         "    ddp_local_rank = int", ("--learning_rate=1e-3",), "linear_scaling"),
    ],
    ids=["clean", "twice", "never", "no gradient", "no warm-up", "linear"],
)  # fmt: skip
def test_nanogpt(
    tmp_path: Path, server: ServerProcess, old: str, new: str, flags: tuple[str, ...],
    kind: str | None,
) -> None:  # fmt: skip
    script, *usual = BY_NAME["nanogpt"].prepare(tmp_path)
    text = (tmp_path / script).read_text()
    assert text.count(old) == 1
    (tmp_path / script).write_text(text.replace(old, new))
    run = launch(server, tmp_path, *TORCHRUN, script, *usual, *NANOGPT, *flags, **EACH_STEP)
    assert [one["kind"] for one in said_of(run, 60)] == ([] if kind is None else [kind])


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers: pip install 'rankscope[dev]'",
)
@pytest.mark.parametrize(("more", "kinds"), [(("once",), []), ((), ["accumulation"])])
def test_a_trainer_of_hugging_face(
    tmp_path: Path, server: ServerProcess, more: tuple[str, ...], kinds: list[str]
) -> None:
    script = str(MISTAKES / "divides_for_the_trainer.py")
    run = launch(server, tmp_path, *TORCHRUN, script, "out", *more, **EACH_STEP)
    assert [one["kind"] for one in said_of(run, 60)] == kinds
