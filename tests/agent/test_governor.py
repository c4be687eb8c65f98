"""The governor in a real process: above the budget the source steps down, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope import schema
from rankscope.hooks.collectives.probe import build
from tests.agent import recorded


def changes(rank: recorded.Recorded) -> list[schema.Event]:
    return [event for event in rank.of(schema.Event) if event.name == "source_changed"]


@pytest.mark.parametrize("source", ["probe", "kernels"])
def test_steps_down_and_in_the_end_stops(tmp_path: Path, source: str) -> None:
    if source == "probe":
        build.build()
    more = {"RANKSCOPE_OVERHEAD_PERCENT": "0.000001", "RANKSCOPE_COLLECTIVES": source}
    done = recorded.run(tmp_path, "steps_and_collectives.py", "14", ranks=1, **more)
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    (rank,) = recorded.read(tmp_path)
    first, second = changes(rank)
    assert first.fields["to"] == "without call sites"
    assert second.fields["to"] == "collectives are not recorded any more"
    assert float(first.fields["overhead_ratio"]) > float(first.fields["budget_ratio"])
    steps = rank.collectives["step"]
    assert (rank.collectives["call_site"][steps < first.step - 1] > 0).all()
    assert (rank.collectives["call_site"][(steps > first.step) & (steps < second.step)] == 0).all()
    assert steps.max() <= second.step + 1
    assert len(rank.steps) == rank.steps["step"].max()  # steps go on being recorded
    assert rank.steps["step"].max() > second.step + 10
    assert "budget" in rank.of(schema.RankRegistered)[-1].sources["collectives"]


def test_within_the_budget_nothing_changes(tmp_path: Path) -> None:
    more = {"RANKSCOPE_OVERHEAD_PERCENT": "90"}
    done = recorded.run(tmp_path, "steps_and_collectives.py", "7", ranks=1, **more)
    assert done.returncode == 0, done.stderr
    (rank,) = recorded.read(tmp_path)
    assert not changes(rank)
    assert len(rank.collectives) >= rank.steps["step"].max()
