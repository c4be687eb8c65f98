"""What is said once: checkpoints, a rank that crashes, and the peers that lose it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.wire import schema
from tests.simulator.engine import Step
from tests.simulator.job import Fault, Job
from tests.simulator.told import MS, START_NS, Item

_CAUSE = ("RuntimeError", "CUDA error: an illegal memory access was encountered")
_ECHO = ("RuntimeError", "Connection closed by peer [10.0.0.7]:41234")
_ECHO_AFTER_MS, _END_AFTER_MS = 120.0, 200.0


def saves(job: Job, block: list[Step]) -> Iterator[Item]:
    """Yield the checkpoints of some steps, as each rank saved them."""
    for step in block:
        took = step.spent["checkpoint"].ravel()
        ended = step.ended.ravel()
        for rank in np.flatnonzero(np.isfinite(ended) & (took > 0)).tolist():
            time_ns = START_NS + int(ended[rank] * MS)
            yield time_ns, schema.Event(
                attempt=0, rank=rank, time_ns=time_ns, name="checkpoint", step=step.number,
                fields={"seconds": f"{took[rank] / 1e3:.3f}", "how": "torch.save"},
            )  # fmt: skip


def crash(job: Job, fault: Fault, step: Step) -> Iterator[Item]:
    """Yield the error of a rank, its end, and what those say that wait for it."""
    moved = step.moved.ravel()
    at_ms = float(moved[fault.rank])
    yield from _error(fault.rank, at_ms, _CAUSE, step.number)
    yield from _end(fault.rank, at_ms + _END_AFTER_MS, step.number)
    for rank in range(job.num_ranks):
        if rank != fault.rank:
            late_ms = max(at_ms, float(moved[rank])) + _ECHO_AFTER_MS + (rank % 7)
            yield from _error(rank, late_ms, _ECHO, step.number, "collective")
            yield from _end(rank, late_ms + _END_AFTER_MS, step.number)


def _error(
    rank: int, at_ms: float, what: tuple[str, str], step: int, where: str = "main"
) -> Iterator[Item]:
    time_ns = START_NS + int(at_ms * MS)
    yield time_ns, schema.ErrorRaised(
        attempt=0, rank=rank, time_ns=time_ns, type=what[0], message=what[1], step=step,
        where=where,  # type: ignore[arg-type]
    )  # fmt: skip


def _end(rank: int, at_ms: float, step: int) -> Iterator[Item]:
    time_ns = START_NS + int(at_ms * MS)
    yield (
        time_ns,
        schema.RankEnded(
            attempt=0,
            rank=rank,
            time_ns=time_ns,
            reason="exception",
            exit_code=1,
            last_step=step - 1,
        ),
    )
