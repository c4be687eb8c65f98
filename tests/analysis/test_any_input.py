"""Detectors never fail, whatever part of a job's records came, in whatever order."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose import DETECTORS
from tests.analysis.gpu_samples import gpu_columns, health
from tests.analysis.records import grouped
from tests.analysis.simulator import MS, START_NS

Item = schema.AnyRecord | tuple[schema.Chunk, dict[str, np.ndarray]]


def metrics(chance: random.Random, rank: int, attempt: int) -> schema.Metrics:
    names = [
        "loss", "loss_nonfinite", "gradient_norm", "gradient_nonfinite", "gradient_norm_local",
        "gradient_local_nonfinite", "samples", "tokens", "replica_checksum", "rss_bytes",
        "cuda_allocated_bytes", "cuda_reserved_bytes", "version_read", "version_applied",
        "version_backward", "staleness_bound", "shard_0_requests", "shard_1_requests",
        "shard_1_queue_seconds", "shard_1_bytes", "parameters",
    ]  # fmt: skip
    values = [0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"), 3.5, 1e9]
    step = chance.randrange(1, 400)
    return schema.Metrics(
        attempt=attempt, rank=rank, time_ns=START_NS + step * MS, step=step,
        values={name: chance.choice(values) for name in chance.sample(names, 8)},
    )  # fmt: skip


def steps(chance: random.Random, rank: int, attempt: int) -> Item:
    count, first = chance.randint(1, 60), chance.randrange(1, 300)
    columns = {name: np.zeros(count, np.int64) for name in schema.STEP_COLUMNS}
    columns["step"] = np.arange(first, first + count)
    columns["started_ns"] = START_NS + columns["step"] * 10**9
    for name in ("duration_ns", "data_ns", "forward_ns", "checkpoint_ns", "backward_blocked_ns"):
        columns[name] = np.array([chance.choice([-1, 0, MS, 10**9]) for _ in range(count)])
    columns["flags"] = np.array([chance.randrange(16) for _ in range(count)])
    chunk = schema.Chunk(
        kind="steps", attempt=attempt, rank=rank, host="a", count=count, time_lo_ns=START_NS,
        time_hi_ns=START_NS + 1, data=str(chance.random()).encode(),
    )  # fmt: skip
    return chunk, columns


def samples(chance: random.Random) -> Item:
    host = chance.choice(["a", "b", ""])
    kind = chance.choice(["gpu", "gpu_health", "host", "disk", "cgroup", "gpu_process"])
    if kind == "gpu":
        columns = gpu_columns(chance.randint(1, 9), chance.randint(1, 90), chance.randrange(99))
    elif kind == "gpu_health":
        columns = health({"ecc_corrected": [chance.randrange(99)]}, chance.randrange(99))
    else:
        columns = {}
        for name in schema.CHUNK_COLUMNS[kind]:
            column = np.array([chance.choice([-1, 0, 1, 10**12]) for _ in range(5)])
            columns[name] = ["x"] * 5 if name in schema.STRING_COLUMNS else column  # type: ignore[assignment]
        columns["time_ns"] = START_NS + np.arange(5) * 10**9
    chunk = schema.Chunk(
        kind=kind, attempt=0, rank=-1, host=host, count=len(columns["time_ns"]),  # type: ignore[arg-type]
        time_lo_ns=START_NS, time_hi_ns=START_NS + 1, data=str(chance.random()).encode(),
    )  # fmt: skip
    return chunk, columns


def other(chance: random.Random, rank: int, attempt: int) -> Item:
    who = {"attempt": attempt, "rank": rank, "time_ns": START_NS + chance.randrange(10**12)}
    event = chance.choice(["xid", "checkpoint", "data loader", "gpu ecc error", "oom kill"])
    fields = {
        "number": chance.choice(["79", "x", ""]), "seconds": chance.choice(["2.5", "nan", "x"]),
        "num_workers": chance.choice(["2", "-", "0"]), "gpu": chance.choice(["0", "unknown"]),
        "host": chance.choice(["a", "b"]),
    }  # fmt: skip
    return chance.choice([
        schema.Event(**who, name=event, step=chance.randrange(400), fields=fields),
        schema.Environment(**who, facts={"torch": chance.choice("12"), "env.X": chance.choice("12"),
                                         "host.memory_bytes": chance.choice(["1000", "x"])}),
        schema.RankRegistered(**who, world_size=chance.choice([1, 4, 8]), local_rank=rank % 4,
                              local_world_size=4, node_rank=rank // 4, host=chance.choice("ab"),
                              pid=1, num_stages=chance.choice([0, 4]), stage=rank % 4),
        schema.RankEnded(**who, reason=chance.choice(["clean", "signal", "lost"]), signal=9),
        grouped(**who, ranks=[0, 1, 2], group="g", backend=""),
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_no_detector_fails(seed: int) -> None:
    chance = random.Random(seed)
    state, ranks = RunState("run"), chance.choice([1, 2, 4, 8])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            for _ in range(chance.randint(1, 80)):
                rank, attempt = chance.randrange(ranks), chance.choice([0, 0, 0, 1])
                item = chance.choice([metrics, metrics, steps, other])(chance, rank, attempt)
                if chance.random() < 0.1:
                    item = samples(chance)
                if isinstance(item, tuple):
                    state.apply_chunk(item[0], dict(item[1]))
                else:
                    state.apply_record(item)
            look = state.look(START_NS + chance.randrange(10**12))
            assert len(look.detectors) == len(DETECTORS)
            for status in look.detectors:
                assert status.state == "ran" or (status.reason and status.remedy), status.name
            for finding in look.findings:
                assert finding.what
                assert finding.why
                assert finding.next
                assert finding.would_be_wrong_if
                assert 0 <= finding.confidence <= 1
                assert set(finding.ranks) <= set(range(8))
            assert len({finding.key for finding in look.findings}) == len(look.findings)
