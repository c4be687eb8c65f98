"""Real runs of DDP and of FSDP: what one is said to send and hold is what the other really does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rankscope.planning.stages import stages_of
from rankscope.planning.traffic import messages_of
from rankscope_server.api.runs.queries import run_row
from rankscope_server.api.what_if.recording import recorded_of
from rankscope_server.what_if.answers import Change, answer
from rankscope_server.what_if.engine import engine_of, planned_model
from rankscope_server.what_if.recorded import GATHERS, REDUCTIONS, SCATTERS, Recorded
from tests.command_server import run
from tests.scenarios.conftest import Watched
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc]
LAYERS, MICROBATCHES, STEPS = 5, 3, 24
FLAGS = f"--layers {LAYERS} --width 96 --microbatches {MICROBATCHES} --steps {STEPS}".split()


def recorded(server: ServerProcess, directory: Path, strategy: str) -> tuple[Watched, Recorded]:
    """Train for some steps; return the run, and what the server's store shows of it."""
    watched = Watched(server, directory, strategy)
    watched.start_forked(2, "--device", "cpu", "--strategy", strategy, *FLAGS)
    try:
        watched.until(lambda: watched.get().get("run", {}).get("status") == "ended")
    finally:
        watched.stop()
    engine = sa.create_engine(f"sqlite:///{server.folder / 'rankscope.db'}")
    with engine.connect() as connection:
        found = recorded_of(connection, run_row(connection, strategy))
    engine.dispose()
    return watched, found


def sent_by(plan: Recorded, change: Change) -> dict[str, float]:
    """Return the bytes of each operation in a step, as the planner says."""
    layout = answer(plan, change).layout
    model = planned_model(plan, layout)
    sent: dict[str, float] = {}
    for messages in messages_of(model, layout, stages_of(model, layout)[0]):
        size = messages.count * messages.size_bytes
        sent[messages.operation] = sent.get(messages.operation, 0.0) + size
    return sent


def test_what_fsdp_would_send_is_what_it_sends(server: ServerProcess, tmp_path: Path) -> None:
    watched, ddp = recorded(server, tmp_path, "ddp")
    _, fsdp = recorded(server, tmp_path, "fsdp")
    for found, strategy in ((ddp, "ddp"), (fsdp, "fsdp")):
        assert (found.strategy, found.ranks, found.nodes) == (strategy, 2, 1)
        assert found.microbatches == MICROBATCHES
        assert found.num_layers == LAYERS
        assert found.item_bytes == 4
        assert found.num_reductions == 1
        assert answer(found, Change()).step_ms == pytest.approx(found.step_ms)
        assert engine_of(found).layout.family == strategy
    assert ddp.parameters == fsdp.parameters > 0
    assert ddp.gradient_bytes == pytest.approx(4 * ddp.parameters)
    as_fsdp = sent_by(ddp, Change(strategy="fsdp"))
    assert fsdp.bytes_of(SCATTERS) == pytest.approx(as_fsdp["reduce_scatter"], rel=0.02)
    # what is outside of the layers stays gathered from forward to backward
    assert fsdp.bytes_of(GATHERS) == pytest.approx(as_fsdp["all_gather"], rel=0.15)
    as_ddp = sent_by(fsdp, Change(strategy="ddp"))
    assert ddp.bytes_of(REDUCTIONS) == pytest.approx(as_ddp["all_reduce"], rel=0.02)
    _is_the_same_without_a_server(watched, tmp_path)


def _is_the_same_without_a_server(watched: Watched, directory: Path) -> None:
    """The run's directory on its node answers as the server does."""
    folders = [path for path in directory.rglob("ddp") if path.is_dir()]
    assert len(folders) == 1, folders
    environ = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    done = run(
        [sys.executable, "-m", "rankscope", "what-if", str(folders[0]), "--strategy", "fsdp",
         "--json"],
        env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    local: dict[str, Any] = json.loads(done.stdout)
    asked: dict[str, Any] = watched.get("/what-if?strategy=fsdp")
    assert local["now"]["text"] == asked["now"]["text"]
    (here,), (there,) = local["answers"], asked["answers"]
    assert here["step_ms"] == pytest.approx(there["step_ms"], rel=0.01)
    assert here["memory_bytes"] == pytest.approx(there["memory_bytes"], rel=0.01)
