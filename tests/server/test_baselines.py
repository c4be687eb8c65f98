"""Earlier runs of the same command are found in the store, and a slower run is told of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.analysis.baselines import earlier_runs
from tests.server.conftest import Sender, TestClient

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


def test_a_slower_run_is_compared_with_earlier_ones_of_its_command(client: TestClient) -> None:
    for number in range(5):
        send_run(client, f"old-{number}", number, 100.0 + 0.1 * number, "train.py", "2.27.3")
    send_run(client, "other", 6, 50.0, "other.py", "2.27.3")
    run = send_run(client, "new", 7, 106.0, "train.py", "2.27.5")
    service = client.app.state.service  # type: ignore[attr-defined]
    with service.reader.connect() as connection:
        found = earlier_runs(connection, "new")
        assert [one.run_id for one in found] == [f"old-{number}" for number in range(5)]
        assert [round(one.step_ms) for one in found] == [100] * 5
        assert found[0].facts["nccl"] == "2.27.3"
        assert found[0].phases_ms["forward"] == 30.0
        assert earlier_runs(connection, "old-0") == ()
    service.analysis.look_now()
    (finding,) = [one for one in run.get("/findings")["open"] if one["kind"] == "regression"]
    assert "5.8 % slower than the last 5 runs" in finding["what"]
    assert "nccl 2.27.3 -> 2.27.5" in finding["why"]
    assert "backward holds" in finding["why"]
