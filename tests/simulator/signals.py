"""What tells kinds of slowness apart: counters of a step, and samples of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from tests.simulator.engine import Array, Step
from tests.simulator.job import Fault, Job
from tests.simulator.told import MS, START_NS, Item

_CLOCK_MHZ, _SLOW_CLOCK_MHZ = 1700, 1400
_THERMAL = 0x040  # NVML: hardware thermal slowdown


def step_signals(job: Job, step: Step, columns: dict[str, Array], place: int) -> None:
    """Write the counters of one step, healthy and not, into its row of the columns."""
    chance = np.random.default_rng((job.seed, 3, step.number))
    columns["involuntary_switches"][place] = chance.poisson(1.0, job.num_ranks)
    columns["cpu_ns"][place] = int(job.forward_ms * 0.5 * MS)
    for fault in job.faults:
        if not fault.covers(step.number):
            continue
        if fault.kind == "contention":
            columns["involuntary_switches"][place, fault.rank] += 40
        elif fault.kind == "page_cache":
            columns["major_faults"][place, fault.rank] += 25
        elif fault.kind == "garbage":
            stage = job.place(fault.rank)
            own = sum(float(step.spent[name][stage] - step.blocked[name][stage])
                      for name in ("forward", "backward"))  # fmt: skip
            columns["gc_ns"][place, fault.rank] = int(own * fault.size / (1 + fault.size) * MS)


def gpu_samples(job: Job, block: list[Step]) -> Iterator[Item]:
    """Yield a sample a second of the GPUs of hosts on which one is held down by heat."""
    hot = [fault for fault in job.faults if fault.kind == "thermal"]
    for host in sorted({fault.rank // job.ranks_per_host for fault in hot}):
        first = host * job.ranks_per_host
        ranks = list(range(first, min(first + job.ranks_per_host, job.num_ranks)))
        begin, end = float(block[0].started.min()), float(np.max(block[-1].ended))
        times = np.arange(begin, end, 1000.0) if np.isfinite(end) else np.array([begin])
        yield _gpus(job, hot, block, ranks, times)
        columns: dict[str, Column] = {
            name: np.full(len(ranks), -1) for name in schema.CHUNK_COLUMNS["gpu_process"]
        }
        columns |= {"time_ns": np.full(len(ranks), START_NS), "rank": np.array(ranks),
                    "gpu": np.array([rank - first for rank in ranks])}  # fmt: skip
        yield START_NS, (_chunk(job, "gpu_process", ranks[0], columns, str(begin)), columns)


def _gpus(job: Job, hot: list[Fault], block: list[Step], ranks: list[int], times: Array) -> Item:
    count = len(ranks) * len(times)
    floats = schema.FLOAT_COLUMNS
    columns: dict[str, Column] = {
        name: np.full(count, -1, np.float32 if name in floats else np.int64)
        for name in schema.CHUNK_COLUMNS["gpu"]
    }
    clock, bits = np.full((len(times), len(ranks)), _CLOCK_MHZ), np.zeros((len(times), len(ranks)))
    for fault in hot:
        starts = [float(s.started.min()) for s in block if fault.covers(s.number)]
        if starts and fault.rank in ranks:
            clock[times >= min(starts), ranks.index(fault.rank)] = _SLOW_CLOCK_MHZ
            bits[times >= min(starts), ranks.index(fault.rank)] = _THERMAL
    columns |= {
        "time_ns": START_NS + (np.repeat(times, len(ranks)) * MS).astype(np.int64),
        "gpu": np.tile(np.array([rank - ranks[0] for rank in ranks]), len(times)),
        "sm_clock_mhz": clock.ravel().astype(np.int64),
        "throttle_reasons": bits.ravel().astype(np.int64),
        "utilization_ratio": np.full(count, 0.95, np.float32),
    }
    arrival = int(np.max(np.asarray(columns["time_ns"])))
    return arrival, (_chunk(job, "gpu", ranks[0], columns, str(times[0])), columns)


def _chunk(
    job: Job, kind: schema.ChunkKind, rank: int, columns: dict[str, Column], name: str
) -> schema.Chunk:
    times = np.asarray(columns["time_ns"])
    return schema.Chunk(
        kind=kind, attempt=0, rank=schema.NODE_RANK, host=job.host(rank), count=len(times),
        time_lo_ns=int(times.min()), time_hi_ns=int(times.max()),
        data=f"{kind} {job.host(rank)} {name}".encode(),
    )  # fmt: skip
