"""A job with one slow rank, and the samples of its processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import MS, START_NS, Item, apply
from tests.analysis.timeline import Act, Timeline, noisy

RANKS, STEPS, STEP_MS = 8, 200, 100.0


def job(seed: int, slow: int, onset: int, extra_ms: float, phase: str) -> Timeline:
    noise = noisy(seed, RANKS, STEPS, 0.05)

    def program(rank: int, step: int) -> list[Act]:
        late = extra_ms if rank == slow and step >= onset else 0.0
        return [
            Act("compute", 1.0 + late * (phase == "data"), "data"),
            Act("compute", 30 * noise[rank, step] + late * (phase == "forward"), "forward"),
            Act("compute", 60 * noise[rank, step], "backward"),
            Act("issue", 3.0, "backward"),
            Act("wait", phase="backward"),
            Act("compute", 2.0, "optimizer"),
            Act("compute", 1.0 + late * (phase == "other"), "other"),
        ]

    return Timeline(RANKS, STEPS, program, {"world": tuple(range(RANKS))}).run()


def process_samples(
    run: Timeline,
    delay: Callable[[int, float], float],
    cpus: Callable[[int, float], int] = lambda rank, ms: 0,
    throttled: Callable[[int, float], float] = lambda rank, ms: 0.0,
) -> list[Item]:
    """Return samples of all ranks, one a second.

    `delay(rank, ms)` is the share without a CPU, `cpus(rank, ms)` how many it may use; 0: not told.
    `throttled(rank, ms)` is the share for which a limit of 0.4 CPUs held it up.
    """
    end_ms = run.ranks[0].steps[-1]["ended"]
    items: list[Item] = []
    times = np.arange(0, end_ms, 1000.0)
    for rank in range(RANKS):
        share = np.array([delay(rank, time) for time in times])
        names = schema.CHUNK_COLUMNS["process"]
        columns: dict[str, Column] = {name: np.zeros(len(times), np.int64) for name in names}
        columns["time_ns"] = START_NS + (times * MS).astype(np.int64)
        columns["rank"] = np.full(len(times), rank)
        columns["run_delay_us_total"] = np.concatenate([[0], np.cumsum(share[:-1] * 1e6)]).astype(
            np.int64
        )
        limited = np.array([throttled(rank, time) for time in times])
        columns["throttled_us_total"] = (np.cumsum(limited) * 1e6).astype(np.int64)
        columns["cpu_limit_millicores"] = np.where(limited > 0, 400, 0)
        columns["cpus_allowed"] = np.array([cpus(rank, time) for time in times])
        items.append(chunk("process", "node-0", columns, rank))
    return items


def chunk(kind: schema.ChunkKind, host: str, columns: dict[str, Column], number: int) -> Item:
    times = np.asarray(columns["time_ns"])
    return int(times.max()), (
        schema.Chunk(
            kind=kind, attempt=0, rank=schema.NODE_RANK, host=host, count=len(times),
            time_lo_ns=int(times.min()), time_hi_ns=int(times.max()),
            data=f"{kind} {number}".encode(),
        ),
        columns,
    )  # fmt: skip


def look_at(items: list[Item]) -> Look:
    state = RunState("run")
    apply(state, sorted(items, key=lambda item: item[0]))
    return state.look(START_NS + 10**12)
