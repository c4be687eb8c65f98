"""A wait is never work: what is recorded as blocked is what ranks really waited, step by step."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from rankscope.rank.context import HookSkipped
from rankscope.rank.hooks.collectives import SOURCES, choose
from tests.waits import truth
from tests.waits.programs import PROGRAMS

pytestmark = [pytest.mark.multiproc, pytest.mark.quiet, pytest.mark.needs("compiler")]

STEPS, SLOW_MS = 28, 40.0
# Of the steps of one rank: 2 % of them are 0.9 ms here, beside what it had no processor for. A wait
# that is not seen is most of a step.
ENOUGH, ENOUGH_OF_ALL = 0.8, 0.95
NEARLY, ENOUGH_NEARLY = 0.1, 0.8


@pytest.mark.parametrize("source", [source.name for source in SOURCES])
def test_every_wait_is_seen(source: str, tmp_path: Path) -> None:
    try:
        choose(source)
    except HookSkipped as reason:
        pytest.skip(str(reason))
    found = truth.run(
        tmp_path, truth.library(tmp_path), list(PROGRAMS), source=source, ranks=2, steps=STEPS,
        slow_ms=SLOW_MS,
    )  # fmt: skip
    sys.stdout.write("\n".join(map(str, found)))
    assert Counter(waits.program for waits in found) == dict.fromkeys(PROGRAMS, 2)
    assert all(len(waits.duration) >= STEPS - truth.WARM_UP - 1 for waits in found)
    wrong = [
        str(waits) for waits in found
        if waits.share_within(truth.WITHIN) < ENOUGH or waits.share_within(NEARLY) < ENOUGH_NEARLY
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    assert sum(waits.share_within(truth.WITHIN) for waits in found) / len(found) >= ENOUGH_OF_ALL
