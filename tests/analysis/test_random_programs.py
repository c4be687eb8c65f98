"""Random programs over nested groups: a replay is right or refused, and nobody is accused."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rankscope_server.analysis.state import RunState
from rankscope_server.findings.policy import POLICY
from rankscope_server.replay.recorded_program import NoReplay
from rankscope_server.replay.replay import Replay
from tests.analysis.simulator import START_NS, Item, apply, spoil
from tests.analysis.timeline import Act, Timeline, attempt_of, noisy

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")


def draw(seed: int) -> tuple[list[Item], int]:
    """Return a job of random calls, and its slow rank, -1 for none."""
    chance = random.Random(seed)
    ranks, steps = chance.choice([4, 6, 8]), chance.choice([20, 40, 70])
    half = ranks // 2
    groups = {"world": tuple(range(ranks))}
    groups |= {f"tp-{k}": tuple(range(k * half, (k + 1) * half)) for k in (0, 1)}
    groups |= {f"dp-{k}": (k, k + half) for k in range(half)}
    calls = [
        (chance.choice(["world", "tp", "dp", "pair"]), chance.uniform(0.5, 20),
         chance.uniform(0.1, 8), chance.random() < 0.3, chance.choice([1 << 10, 1 << 20, 32 << 20]),
         chance.choice(OPERATIONS))
        for _ in range(chance.randint(1, 10))
    ]  # fmt: skip
    calls.append(("world", 1.0, 1.0, False, 4, "all_reduce"))
    factor = noisy(seed, ranks, steps, chance.choice([0.01, 0.1, 0.3]))
    slow = chance.randrange(ranks) if chance.random() < 0.5 else -1
    if slow >= 0:
        factor[slow] *= 1.6

    def program(rank: int, step: int) -> Sequence[Act]:
        acts = [Act("compute", 0.3, "data")]
        for kind, work, took, is_lazy, size, operation in calls:
            acts.append(Act("compute", work * factor[rank, step], "forward"))
            if kind == "pair":
                peer = rank + half if rank < half else rank - half
                acts.append(Act("send" if rank < half else "recv", took, peer=peer,
                                size_bytes=size))  # fmt: skip
            else:
                group = next(name for name in groups if name.startswith(kind)
                             and rank in groups[name])  # fmt: skip
                acts.append(Act("issue", took, group=group, size_bytes=size, operation=operation))
            if not is_lazy:
                acts.append(Act("wait"))
        return [*acts, Act("compute", 1.0, "optimizer")]

    job = Timeline(ranks, steps, program, groups).run()
    stages = [rank // half for rank in range(ranks)] if chance.random() < 0.5 else []
    return job.items(clock_error_ms=chance.choice([0, 300]), hosts=2, stages=stages), slow


def replay_of(items: Sequence[Item]) -> Replay | None:
    state = attempt_of(items)
    try:
        return state.replays.newest(state.steps, state.ranks, state.groups, POLICY)[0]
    except NoReplay:
        return None


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program(seed: int) -> None:
    items, slow = draw(seed)
    for given in (items, spoil(items, seed, lost=0.03)):
        state = RunState("run")
        apply(state, given)
        look = state.look(START_NS + 10**12)
        accused = {f.ranks for f in look.findings if f.detector == "straggler"}
        assert accused <= {(slow,)}
        assert not [f for f in look.findings if f.kind == "low_bus_bandwidth"]
        above = {f.detector for f in look.findings if f.severity != "info"}
        assert above <= {"straggler"}


def test_most_random_programs_can_be_replayed() -> None:
    replays = [replay_of(draw(seed)[0]) for seed in range(24)]
    assert sum(replay is not None for replay in replays) >= 20
