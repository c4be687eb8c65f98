"""Several ranks that became slower together: the group is told, with what it has in common."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.simulator import START_NS
from tests.analysis.stalling import MS, chunk_of, group_of

STEPS, SINCE = 240, 120
RANKS, ON_HOST = 8, 2


def findings(
    slow: Collection[int],
    *,
    ratio: float = 1.6,
    noise: float = 0.05,
    seed: int = 1,
    facts: dict[str, str] | None = None,
    steps: int = STEPS,
) -> list[Finding]:
    """Return what is said of 8 ranks on 4 hosts, some of which are slow from a step on.

    `facts` are those of the environment of the slow ones; the others have "old" for each.
    """
    chance, state = np.random.default_rng(seed), RunState("run")
    own = 80 * np.exp(noise * chance.standard_normal((RANKS, steps)))
    own[sorted(slow), SINCE:] *= ratio
    step_ms = own.max(axis=0) + 5.0
    started = (START_NS + np.r_[0, np.cumsum(step_ms)[:-1]] * MS).astype(np.int64)
    for rank in range(RANKS):
        state.apply_record(
            schema.RankRegistered(
                attempt=0, rank=rank, time_ns=START_NS, world_size=RANKS, local_rank=rank % ON_HOST,
                local_world_size=ON_HOST, node_rank=rank // ON_HOST, host=f"node-{rank // ON_HOST}",
                pid=100 + rank,
            )
        )  # fmt: skip
        known = dict.fromkeys(facts or {}, "old") if rank not in slow else facts or {}
        state.apply_record(
            schema.Environment(attempt=0, rank=rank, time_ns=START_NS, facts={"os": "x"} | known)
        )
        state.apply_record(group_of(rank, RANKS))
        columns = {
            "step": np.arange(1, steps + 1),
            "started_ns": started,
            "duration_ns": (step_ms * MS).astype(np.int64),
            "forward_ns": (own[rank] * 0.6 * MS).astype(np.int64),
            "backward_ns": ((step_ms - own[rank] * 0.6) * MS).astype(np.int64),
            "backward_blocked_ns": ((step_ms - own[rank]) * MS).astype(np.int64),
            "flags": np.zeros(steps, np.int64),
        }
        state.apply_chunk(chunk_of(rank, steps, int(started[-1])), columns)
    return state.look(int(started[-1]) + 10**9).findings


def accused(found: list[Finding]) -> list[Finding]:
    return [
        finding
        for finding in found
        if finding.kind == "slow_compute" and finding.severity != "info"
    ]


@pytest.mark.parametrize("slow", [(2, 3), (0, 1, 2, 3), (0, 1, 4, 5, 6), (0, 1, 2, 3, 4, 5, 7)])
def test_the_whole_group_is_named_and_no_one_else(slow: tuple[int, ...]) -> None:
    (finding,) = accused(findings(slow))
    assert finding.ranks == slow
    assert finding.onset_step is not None
    assert abs(finding.onset_step - (SINCE + 1)) <= 3
    assert finding.cost_throughput_ratio == pytest.approx(1 - 90 / 140, abs=0.06)
    assert set(finding.victims) == set(range(RANKS)) - set(slow)


def test_the_onset_of_most_ranks_stays_where_it_was() -> None:
    (finding,) = accused(findings((0, 1, 4, 5, 6), steps=1500))
    assert finding.onset_step is not None
    assert abs(finding.onset_step - (SINCE + 1)) <= 3


def test_ranks_of_one_host_are_told_as_such() -> None:
    (finding,) = accused(findings((2, 3)))
    assert finding.hosts == ("node-1",)
    assert "What they alone have in common: they are the ranks of host node-1" in finding.why


def test_a_version_that_only_they_have_is_told() -> None:
    (finding,) = accused(findings((0, 3, 5, 6, 7), facts={"nccl.version": "2.19", "pid": "7"}))
    assert "nccl.version is 2.19 on them, old on others" in finding.why
    assert "pid" not in finding.why.split("in common")[1]


def test_the_same_slot_of_each_host_is_told() -> None:
    (finding,) = accused(findings((0, 2, 4, 6)))
    assert "each is local rank 0 of its host" in finding.why


def test_where_all_became_slower_nobody_is_accused() -> None:
    assert accused(findings(range(RANKS))) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_noisy_job_accuses_nobody(seed: int) -> None:
    assert accused(findings((), noise=0.3, seed=seed)) == []
