"""Runs that are sent to a server."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from tests.server.conftest import Sender, TestClient
from tests.server.seed import Plan, make_steps, step_chunk

NOW = 1_700_000_000 * 10**9


MS = 1_000_000


def steps(rank: int, step_ms: float, start_ns: int, count: int = 300) -> schema.Chunk:
    chance = np.random.default_rng(rank)
    columns = {name: np.zeros(count, np.int64) for name in schema.STEP_COLUMNS}
    columns["step"] = np.arange(1, count + 1)
    columns["duration_ns"] = (step_ms * MS * (1 + 0.005 * chance.normal(size=count))).astype(
        np.int64
    )
    columns["forward_ns"] = np.full(count, 30 * MS)
    columns["backward_ns"] = columns["duration_ns"] - columns["forward_ns"]
    columns["started_ns"] = start_ns + np.cumsum(columns["duration_ns"])
    return schema.Chunk(
        kind="steps", attempt=0, rank=rank, host="node-a", count=count, time_lo_ns=start_ns,
        time_hi_ns=int(columns["started_ns"][-1]), step_lo=1, step_hi=count,
        data=encode_chunk(dict(columns)),
    )  # fmt: skip


def send_run(
    client: TestClient, name: str, number: int, step_ms: float, command: str, nccl: str
) -> Sender:
    sender = Sender(client, run_id=name, producer=f"p-{name}")
    begun = NOW + number * 10**12
    records: list[Any] = [
        schema.RunStarted(attempt=0, rank=-1, time_ns=begun, name="train.py",
                          command=["python", command], world_size=2)
    ]  # fmt: skip
    for rank in range(2):
        records.append(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=begun, world_size=2, local_rank=rank,
            local_world_size=2, node_rank=0, host="node-a", pid=100 * number + rank + 1,
        ))  # fmt: skip
        records.append(schema.Environment(
            attempt=0, rank=rank, time_ns=begun, facts={"nccl": nccl, "torch": "2.13.0"}
        ))  # fmt: skip
    sender.send(*records, chunks=[steps(rank, step_ms, begun) for rank in range(2)])
    return sender


def steps_of(count: int = 5, rank: int = 0) -> schema.Chunk:
    """Return the first steps of a rank of two, as a chunk."""
    plan = Plan(steps=count, ranks=2)
    return step_chunk(plan, make_steps(plan), rank, 0, count)
