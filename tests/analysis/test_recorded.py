"""Real runs on a shared host, replayed: what the simulator cannot make up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look

FILES = sorted((Path(__file__).parent / "data").glob("*.msgpack"))


def looks(recording: dict[str, Any]) -> list[Look]:
    """Give the steps piece by piece, as they came, and look after each piece."""
    state, num_stages = RunState("recorded"), recording["num_stages"]
    columns = [decode_chunk(data) for data in recording["chunks"]]
    for rank in range(len(columns)):
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=1, world_size=len(columns), local_rank=rank,
            local_world_size=len(columns), node_rank=0, host="node-a", pid=100 + rank,
            stage=rank if num_stages > 1 else -1, num_stages=num_stages if num_stages > 1 else 0,
        ))  # fmt: skip
    found = []
    for begin in range(0, 300, 10):
        for rank, whole in enumerate(columns):
            part = {name: values[begin : begin + 10] for name, values in whole.items()}
            times = np.asarray(part["started_ns"])
            state.apply_chunk(
                schema.Chunk(kind="steps", attempt=0, rank=rank, host="node-a", count=len(times),
                             time_lo_ns=int(times[0]), time_hi_ns=int(times[-1]),
                             data=f"{rank} {begin}".encode()),
                part,
            )  # fmt: skip
        found.append(state.look(int(times[-1])))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_run_is_judged_as_its_manifest_says(file: Path) -> None:
    recording = msgspec.msgpack.decode(file.read_bytes())
    truth = recording["truth"]
    every = looks(recording)
    for look in every:
        accused = {f.ranks for f in look.findings if f.severity != "info"}
        assert accused <= ({(truth["rank"],)} if truth else set())
    verdict = every[-1].verdict
    if truth is None:
        assert verdict is None
        return
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (truth["kind"], (truth["rank"],))
    assert verdict.onset_step is not None
    assert abs(verdict.onset_step - truth["start_step"]) <= 3
