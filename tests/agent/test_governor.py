"""The governor in real processes: above the budget steps are thinned, alike on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.files import ring
from rankscope.native.probe import build
from rankscope.wire import schema, thinning
from tests import capabilities
from tests.agent import recorded

TINY = {"RANKSCOPE_OVERHEAD_PERCENT": "0.000001"}


def changes(rank: recorded.Recorded) -> list[schema.Event]:
    return [event for event in rank.of(schema.Event) if event.name == "thinning_changed"]


def thinned(rank: recorded.Recorded) -> set[int]:
    """Return the steps whose collectives were only counted."""
    steps = rank.steps["step"][(rank.steps["flags"] & schema.STEP_THINNED) != 0]
    return {int(step) for step in steps}


def check_nothing_is_missing(rank: recorded.Recorded) -> None:
    """Every collective has its place in the sequence, and is there unless its step says not."""
    steps = rank.steps
    unseen = (steps["flags"] & schema.STEP_WAITS_UNKNOWN) != 0
    last = np.cumsum(steps["num_collectives"])
    expected = [
        number for step, end in zip(steps[~unseen], last[~unseen], strict=True)
        for number in range(int(end) - int(step["num_collectives"]) + 1, int(end) + 1)
    ]  # fmt: skip
    sequences = rank.collectives["sequence"].tolist()
    assert sequences[: len(expected)] == expected
    flags = rank.collectives["flags"]
    of_thinned = np.isin(rank.collectives["step"], sorted(thinned(rank)))
    ended = np.isin(rank.collectives["step"], rank.steps["step"])  # the last one is not over
    assert ((flags[ended] & schema.FLAG_THINNED) != 0).tolist() == of_thinned[ended].tolist()
    assert (rank.collectives["operation"] > 0).all()
    assert (rank.collectives["output_bytes"] > 0).all()


pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("source", ["probe", "kernels"])
def test_thins_alone_where_nobody_answers_and_is_never_off(tmp_path: Path, source: str) -> None:
    if source == "probe" and build.is_needed():
        capabilities.need("compiler")
        build.build()
    more = {**TINY, "RANKSCOPE_COLLECTIVES": source}
    done = recorded.run(tmp_path, "steps_and_collectives.py", "26", "1", ranks=1, **more)
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    (rank,) = recorded.read(tmp_path)
    first = changes(rank)[0]
    assert float(first.fields["overhead_ratio"]) > float(first.fields["budget_ratio"])
    assert "this rank alone" in first.fields["why"]
    level, every = int(first.fields["level"]), int(first.fields["every"])
    assert level >= 2
    assert every == thinning.every(level)
    check_nothing_is_missing(rank)
    steps = rank.steps["step"]
    assert len(steps) == steps.max()  # steps go on being recorded
    later = {int(step) for step in steps if step > first.step}
    assert len(later) > 20
    assert {step for step in later if step % every} <= thinned(rank)
    assert any(step not in thinned(rank) for step in later)
    assert not thinned(rank) & set(range(first.step))
    if source == "kernels":  # with nothing at the dispatcher they cost nothing
        unseen = rank.steps["flags"] & schema.STEP_WAITS_UNKNOWN != 0
        assert unseen.sum() > 0.8 * len(thinned(rank))
        header = ring.RingReader(rank.directory / "collectives.ring", ring.COLLECTIVE_FIELDS)
        assert header.u64(ring.OWN_SWITCH_NS_AT) > 0
    said = rank.of(schema.RankRegistered)[-1].sources["collectives"]
    assert "is recorded whole" in said
    assert "RANKSCOPE_OVERHEAD_PERCENT" in said


def test_all_ranks_of_a_node_thin_the_same_steps(tmp_path: Path) -> None:
    more = {**TINY, "RANKSCOPE_COLLECTIVES": "kernels", "RANKSCOPE_COLLECTOR": "1"}
    done = recorded.run(tmp_path, "steps_and_collectives.py", "22", "1", ranks=3, **more)
    assert done.returncode == 0, done.stderr
    ranks = recorded.read(tmp_path)
    assert len(ranks) == 3
    for rank in ranks:
        assert thinned(rank) == thinned(ranks[0])
        check_nothing_is_missing(rank)
        assert all("agreed for all ranks" in event.fields["why"] for event in changes(rank))
    assert len(thinned(ranks[0])) > 20
    assert len({tuple(event.step for event in changes(rank)) for rank in ranks}) == 1


def test_the_level_of_a_server_that_is_behind_stays_beside_that_of_the_budget(
    tmp_path: Path,
) -> None:
    more = {"RANKSCOPE_OVERHEAD_PERCENT": "90", "RANKSCOPE_COLLECTIVES": "kernels"}
    done = recorded.run(tmp_path, "asked_by_server.py", ranks=1, **more)
    assert done.returncode == 0, done.stderr
    (rank,) = recorded.read(tmp_path)
    servers, own = changes(rank)  # what the budget needs less than the server is not seen
    assert (servers.fields["level"], servers.fields["from_step"]) == ("3", "60")
    assert servers.fields["servers_why"] == "behind by 23 s"
    assert (own.fields["level"], own.fields["from_step"]) == ("2", "160")
    assert own.fields["servers_why"] == ""
    assert own.fields["why"] == "agreed for all ranks; server in time again"
    steps = set(rank.steps["step"].tolist())
    expected = {step for step in steps if step >= 60 and step % (4 if step < 160 else 2)}
    assert thinned(rank) == expected
    check_nothing_is_missing(rank)
    said = [one.sources.get("collectives", "") for one in rank.of(schema.RankRegistered)]
    (why,) = {text for text in said if "one step in 4" in text}
    assert why.endswith("as the server did not keep up (behind by 23 s)")
    assert "RANKSCOPE_OVERHEAD_PERCENT" in said[-1]
    header = ring.RingReader(rank.directory / "collectives.ring", ring.COLLECTIVE_FIELDS)
    assert header.u8(ring.THINNING_AT) == 2
    assert header.u8(ring.THINNING_ASKED_AT) == header.u8(ring.THINNING_WANTED_AT) == 0


def test_within_the_budget_nothing_changes(tmp_path: Path) -> None:
    more = {"RANKSCOPE_OVERHEAD_PERCENT": "90"}
    done = recorded.run(tmp_path, "steps_and_collectives.py", "7", ranks=1, **more)
    assert done.returncode == 0, done.stderr
    (rank,) = recorded.read(tmp_path)
    assert not changes(rank)
    assert not thinned(rank)
    assert len(rank.collectives) >= rank.steps["step"].max()
    header = ring.RingReader(rank.directory / "collectives.ring", ring.COLLECTIVE_FIELDS)
    assert header.u8(ring.THINNING_WANTED_AT) == 0
