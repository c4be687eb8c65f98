"""A script says which stage of its own pipeline a rank holds."""

import os
import subprocess
import sys

import pytest

import rankscope
from rankscope.wire import schema
from tests.agent.watching import Watching


def places(watching: Watching) -> list[tuple[int, int, int, str]]:
    return [
        (one.stage, one.num_stages, one.num_microbatches, one.schedule)
        for one in watching.of(schema.RankRegistered)
    ]


def test_a_stage_is_registered_once_however_often_it_is_said(watching: Watching) -> None:
    before = len(places(watching))
    for _ in range(3):
        rankscope.stage(1, 4)
    rankscope.stage(1, 4, microbatches=8, schedule="by hand")
    assert places(watching)[before:] == [(1, 4, 0, ""), (1, 4, 8, "by hand")]


@pytest.mark.parametrize(("number", "count"), [(-1, 4), (4, 4), (0, 0)])
def test_what_is_no_stage_changes_nothing(watching: Watching, number: int, count: int) -> None:
    before = places(watching)
    rankscope.stage(number, count)
    assert places(watching) == before


@pytest.mark.swallows
def test_it_never_raises(watching: Watching) -> None:
    before = places(watching)
    rankscope.stage("first", None)  # type: ignore[arg-type]
    assert places(watching) == before


def test_without_an_agent_it_does_nothing_and_imports_no_torch() -> None:
    code = "import sys, rankscope; rankscope.stage(0, 2); sys.exit('torch' in sys.modules)"
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    done = subprocess.run([sys.executable, "-c", code], env=kept, check=False)
    assert done.returncode == 0
