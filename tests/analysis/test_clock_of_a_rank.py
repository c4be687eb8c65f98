"""A process whose clock is not that of its machine: set ahead, or running too fast."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.collective_columns import columns_of
from tests.analysis.records import registered
from tests.analysis.simulator import START_NS

STEPS = 400


def findings(shift_ms: dict[int, np.ndarray], ranks: int = 4, seed: int = 1) -> list[Finding]:
    """Return what is said of ranks of one host whose clocks are shifted, ms by operation."""
    chance = np.random.default_rng(seed)
    starts = np.arange(STEPS)[:, None] * 100.0 + chance.uniform(0, 30, (STEPS, ranks))
    end = starts.max(axis=1) + chance.uniform(0.2, 2.0, STEPS)
    ends = end[:, None] + chance.uniform(0, 1.0, (STEPS, ranks))
    state = RunState("run")
    for rank in range(ranks):
        state.apply_record(registered(rank, ranks, backend="gloo"))
        moved = shift_ms.get(rank, np.zeros(STEPS))
        columns = columns_of(starts[:, rank] + moved, ends[:, rank] + moved)
        state.apply_chunk(
            schema.Chunk(kind="collectives", attempt=0, rank=rank, host="node-0", count=STEPS,
                         time_lo_ns=START_NS, time_hi_ns=START_NS, data=encode_chunk(columns)),
            columns,
        )  # fmt: skip
    found = state.look(START_NS + 60 * 10**9).findings
    return [one for one in found if one.detector == "clock"]


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_was_set_is_told_with_its_size(seed: int) -> None:
    shift = np.where(np.arange(STEPS) >= 150, 200.0, 0.0)
    (found,) = findings({2: shift}, seed=seed)
    assert (found.kind, found.ranks, found.severity) == ("clock_offset", (2,), "warning")
    assert "200 ms" in found.what


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_runs_too_fast_is_told_to_drift(seed: int) -> None:
    (found,) = findings({1: np.arange(STEPS) * 0.2}, seed=seed)
    assert (found.kind, found.ranks) == ("clock_drift", (1,))
    assert "more with each stretch" in found.what


@pytest.mark.parametrize("seed", range(10))
def test_one_clock_is_one_clock(seed: int) -> None:
    assert findings({}, seed=seed) == []
    assert findings({3: np.full(STEPS, 3.0)}, seed=seed) == []


def test_of_two_ranks_either_may_be_wrong_and_that_is_said() -> None:
    found = findings({1: np.full(STEPS, 300.0)}, ranks=2)
    assert found
    assert all(one.confidence < 0.85 for one in found)
    assert "not which of the two" in found[0].confidence_text
