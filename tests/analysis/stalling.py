"""Steps of ranks given as arrays: extra work, pauses of the collector, what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import START_NS

MS = 1_000_000
STEPS = 200
Shape = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def look_at(
    shape: Shape,
    ranks: int = 4,
    seed: int = 1,
    noise: float = 0.3,
    sent_ms: float = 5.0,
    recorded: slice | np.ndarray = slice(None),
    unseen: slice | np.ndarray = slice(0),
    steps: int = STEPS,
    waits: bool = True,
    learners: Collection[int] | None = None,
    beside: Callable[[RunState], None] = lambda state: None,
) -> Look:
    """Return what is said of ranks whose (extra work, collector pauses) `shape` gives, ms.

    `recorded` picks the steps that were recorded, of all ranks; `unseen` those that were thinned
    with no wait in them known. Ranks that do not wait for each other have steps of their own.
    Of `learners` alone something goes backward, if they are given. `beside` adds what else is
    known of the run.
    """
    chance = np.random.default_rng(seed)
    state = RunState("run")
    extra, pauses = zip(*(shape(chance, rank) for rank in range(ranks)), strict=True)
    own = 80 * np.exp(noise * chance.standard_normal((ranks, steps))) + np.stack(extra)
    together_ms = own.max(axis=0) + sent_ms
    for rank in range(ranks):
        step_ms = together_ms if waits else own[rank]
        started = START_NS + np.r_[0, np.cumsum(step_ms)[:-1]] * MS
        state.apply_record(registered(rank, ranks))
        state.apply_record(group_of(rank, ranks))
        forward = own[rank] * 0.6
        columns = {
            "step": np.arange(1, steps + 1),
            "started_ns": started.astype(np.int64),
            "duration_ns": (step_ms * MS).astype(np.int64),
            "forward_ns": (forward * MS).astype(np.int64),
            "backward_ns": ((step_ms - forward) * MS).astype(np.int64),
            "backward_blocked_ns": ((step_ms - own[rank]) * MS).astype(np.int64),
            "gc_ns": (pauses[rank] * MS).astype(np.int64),
            "flags": np.zeros(steps, np.int64),
        }
        if learners is not None and rank not in learners:
            columns["forward_ns"] += columns["backward_ns"]
            columns["backward_ns"] = np.zeros(steps, np.int64)
            columns["forward_blocked_ns"] = columns.pop("backward_blocked_ns")
            columns["backward_blocked_ns"] = np.zeros(steps, np.int64)
        columns["flags"][unseen] = schema.STEP_THINNED | schema.STEP_WAITS_UNKNOWN
        columns["backward_blocked_ns"][unseen] = 0
        kept = {name: values[recorded] for name, values in columns.items()}
        state.apply_chunk(chunk_of(rank, len(kept["step"]), int(started[-1])), kept)
    beside(state)
    return state.look(int(started[-1]) + 10**9)


def registered(rank: int, world_size: int) -> schema.RankRegistered:
    return schema.RankRegistered(
        attempt=0, rank=rank, time_ns=START_NS, world_size=world_size, local_rank=rank,
        local_world_size=world_size, node_rank=0, host="node-0", pid=100 + rank,
    )  # fmt: skip


def group_of(rank: int, world_size: int) -> schema.GroupDefined:
    return schema.GroupDefined(
        attempt=0, rank=rank, time_ns=START_NS, group="0", ranks=list(range(world_size)),
        backend="gloo", description="",
    )  # fmt: skip


def chunk_of(rank: int, count: int, last_ns: int) -> schema.Chunk:
    return schema.Chunk(
        attempt=0, rank=rank, host="node-0", kind="steps", count=count, time_lo_ns=START_NS,
        time_hi_ns=last_ns, data=b"%d" % rank,
    )  # fmt: skip
