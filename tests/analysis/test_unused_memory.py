"""GPU memory that no rank uses: advised where all is known, and never a fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.gpu_samples import gpu_columns
from tests.analysis.records import START_NS, registered

GIB = float(1 << 30)
RANKS = 4


def found(
    held: Mapping[int, float], *, steps: int = 300, total: float = 80 * GIB,
    used: float | np.ndarray = 12 * GIB,
    sampled: int = RANKS, visible: str = "0,1,2,3", first_peak: float = 0.0,
) -> list[Finding]:  # fmt: skip
    """Return the advice of a job whose ranks hold so many bytes of GPU memory, by rank.

    `used` is in use on the first `sampled` GPUs; `first_peak` was in tensors in step 60.
    """
    state = RunState("run")
    for rank in range(RANKS):
        state.apply_record(registered(rank, RANKS))
        facts = {"env.CUDA_VISIBLE_DEVICES": visible, "host.memory_bytes": str(int(512 * GIB))}
        state.apply_record(schema.Environment(attempt=0, rank=rank, time_ns=START_NS, facts=facts))
        for step in range(1, steps + 1):
            values = {"rss_bytes": 2 * GIB}
            if rank in held:
                peak = first_peak if step == 60 else 0.5 * held[rank]
                values |= {
                    "cuda_reserved_bytes": held[rank], "cuda_allocated_bytes": 0.4 * held[rank],
                    "cuda_peak_bytes": peak,
                }  # fmt: skip
            state.apply_record(
                schema.Metrics(
                    attempt=0, rank=rank, time_ns=START_NS + step, step=step, values=values
                )
            )
    if sampled:
        filled: dict[str, Any] = {
            "memory_total_bytes": np.array(total), "memory_used_bytes": used,
        }  # fmt: skip
        columns = gpu_columns(sampled, 60, **filled)
        times = columns["time_ns"]
        chunk = schema.Chunk(
            kind="gpu", attempt=0, rank=-1, host="node-0", count=len(times),
            time_lo_ns=int(times.min()), time_hi_ns=int(times.max()), data=b"gpu",
        )  # fmt: skip
        state.apply_chunk(chunk, dict(columns))
    look = state.look(START_NS + 10**13)
    return [finding for finding in look.findings if finding.kind == "unused_memory"]


def each(size: float) -> dict[int, float]:
    return dict.fromkeys(range(RANKS), size)


def test_memory_that_no_rank_uses_is_advice_about_all_of_them() -> None:
    used = np.array([[11], [11], [12], [11]]) * GIB
    (finding,) = found(each(10 * GIB) | {2: 11 * GIB}, used=used)
    assert (finding.severity, finding.ranks, finding.cost_throughput_ratio) == (
        "info", tuple(range(RANKS)), None,
    )  # fmt: skip
    assert "At most 12.0 GiB of 80.0 GiB" in finding.what
    assert "the fullest, rank 2, held no more than 11.0 GiB" in finding.why
    (level,) = finding.levels
    assert (level.chart, level.value) == ("cuda_reserved_bytes", 80 * GIB)
    for word in ("microbatch", "less sharding", "devices with less memory"):
        assert word in finding.next


@pytest.mark.parametrize("size", [38 * GIB, 42 * GIB])
def test_more_than_half_in_use_is_none(size: float) -> None:
    assert bool(found(each(size), used=size + GIB)) == (size < 39 * GIB)


@pytest.mark.parametrize(
    ("held", "changes"),
    [
        (each(10 * GIB) | {3: 50 * GIB}, {}),
        (each(10 * GIB), {"first_peak": 50 * GIB}),
        (each(10 * GIB), {"used": 60 * GIB}),
        (each(10 * GIB), {"sampled": 0}),
        (each(10 * GIB), {"sampled": 3}),
        (each(10 * GIB), {"steps": 200}),
        (each(10 * GIB), {"visible": "MIG-1d2f"}),
        ({rank: 10 * GIB for rank in range(3)}, {}),
        ({}, {}),
    ],
    ids=[
        "one-rank-full", "once-full", "others-on-the-gpu", "no-limit", "one-limit-missing", "short",
        "part-of-a-gpu", "a-rank-without-a-gpu", "no-gpu-used",
    ],
)  # fmt: skip
def test_nothing_is_said_where_it_is_used_or_not_known(
    held: dict[int, float], changes: dict[str, Any]
) -> None:
    assert found(held, **changes) == []
