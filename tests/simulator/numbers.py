"""What training says of itself: losses, gradient norms, memory and checksums of every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rankscope.wire import schema
from tests.simulator.engine import Step
from tests.simulator.job import Job
from tests.simulator.told import MS, START_NS, Item

MIB = 1 << 20
_BASE_BYTES, _WARM_UP_STEPS = 2 << 30, 30
CHECK_STEPS, NORM_STEPS = 20, 4
_SIGMA = 0.05  # of the log of a loss and of a norm


def numbers(job: Job, block: list[Step]) -> Iterator[Item]:
    """Yield the numbers of some steps; a rank that never ends a step says nothing of it."""
    for step in block:
        chance = np.random.default_rng((job.seed, 2, step.number))
        noise = np.exp(chance.normal(0, _SIGMA, (2, job.num_ranks)))
        grown = np.abs(chance.normal(0, 3 * MIB, job.num_ranks))
        ended = step.ended.ravel()
        for rank in np.flatnonzero(np.isfinite(ended)).tolist():
            values = _values(job, step.number, rank, noise[:, rank])
            memory = _BASE_BYTES + min(step.number, _WARM_UP_STEPS) * 10 * MIB + grown[rank]
            values["rss_bytes"] = float(memory + _leaked(job, step.number, rank))
            time_ns = START_NS + int(ended[rank] * MS)
            yield (
                time_ns,
                schema.Metrics(
                    attempt=0, rank=rank, time_ns=time_ns, step=step.number, values=values
                ),
            )


def _values(job: Job, step: int, rank: int, noise: np.ndarray) -> dict[str, float]:
    """Return loss and norms. A NaN is one rank's own first; a step later the reduction has it."""
    loss = (2.0 + 4.0 * math.exp(-step / 150)) * float(noise[0])
    local, shared = 3.0 * float(noise[1]), 1.0
    for fault in job.faults:
        if fault.kind == "nan" and step >= fault.start:
            is_first = step == fault.start
            loss = math.nan if rank == fault.rank or not is_first else loss
            shared = math.nan
            local = math.nan if rank == fault.rank or not is_first else local
    values = {"loss": loss, "loss_nonfinite": float(math.isnan(loss))}
    if step % NORM_STEPS == 0:
        values |= {
            "gradient_norm_local": local, "gradient_local_nonfinite": float(math.isnan(local)),
            "gradient_norm": shared, "gradient_nonfinite": float(math.isnan(shared)),
        }  # fmt: skip
    if step % CHECK_STEPS == 0:
        stage, _, tensor = job.place(rank)
        odd = any(f.kind == "replica_drift" and f.rank == rank and f.covers(step)
                  for f in job.faults)  # fmt: skip
        values["replica_checksum"] = float(1000 * step + 31 * stage + 7 * tensor + 0.5 * odd)
    return values


def _leaked(job: Job, step: int, rank: int) -> float:
    return sum(
        max(0, step - fault.start) * fault.size * MIB
        for fault in job.faults
        if fault.kind == "leak" and fault.rank == rank
    )
