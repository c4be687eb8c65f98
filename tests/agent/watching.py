"""An agent in this process, with real hooks and a real recorder, for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.files import identity
from rankscope.process import family
from rankscope.rank.attach import start
from rankscope.rank.runtime import Agent
from rankscope.settings import Settings
from tests.agent import recorded

# everything that sees steps and numbers; nothing that listens to the test runner itself
HOOKS = (
    "data,evaluation,backward,optimizer,gradient-scaler,checkpoint,distributed-checkpoint,"
    "safetensors,pipeline,pipeline-schedule,garbage-collection,loss,loss-scale,learning-rate,model-size,batches,clipping,"
    "sampling,gradients,replicas,memory,out-of-memory"
)


class Watching:
    """What the agent of this test saw so far."""

    def __init__(self, agent: Agent, directory: Path) -> None:
        self.agent, self.context, self._directory = agent, agent.context, directory

    def read(self) -> recorded.Recorded:
        (one,) = recorded.read(self._directory)
        return one

    @property
    def steps(self) -> list[dict[str, int]]:
        steps = self.read().steps
        return [{name: int(step[name]) for name in steps.dtype.names} for step in steps]

    def of(self, kind: type[Any]) -> list[Any]:
        return self.read().of(kind)


@pytest.fixture
def watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Watching]:
    """Watch this process; an indirect parameter changes the agent's settings."""
    changes = getattr(request, "param", {})
    values = {
        "hooks": HOOKS, "numbers_seconds": 1e-9, "numbers_budget_ratio": 1e9,
        "collector": False, "commands": False,
    }  # fmt: skip
    monkeypatch.setenv(family.ATTACHED, "")
    environ = {"RANKSCOPE_RUN_ID": "test", "RANKSCOPE_DIR": str(tmp_path)}
    agent = Agent(Settings(**(values | changes)), environ)
    agent.install_hooks()
    agent.open(identity.build(environ, 0, 1))
    monkeypatch.setattr(start, "_agent", agent)
    yield Watching(agent, tmp_path)
    agent.remove_hooks()
