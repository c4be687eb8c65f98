"""Several ranks in one process that write what sharded training of a transformer would.

    python load_ranks.py RUN_DIRECTORY RANKS COLLECTIVES_PER_STEP STEP_SECONDS STEPS

Times are drawn: arrivals 2 ms apart or as close as the step allows, durations around 3 ms, calls
that return within 60 us; sizes, operations and places in the script repeat from step to step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from rankscope.files import journal, ring
from rankscope.wire import schema
from tests.agent.collector.fake_rank import FakeRank

SIZES = (2_362_368, 590_592, 28_311_552)
EMBEDDING = 154_533_888
LAYER = 13  # every so many a larger one


class LoadRank:
    """One rank; `step` writes a whole step that has just ended."""

    def __init__(self, run: Path, rank: int, per_step: int, seed: int, attempt: int = 0) -> None:
        self.fake = FakeRank(run, rank, attempt=attempt)
        self._per_step = per_step
        self._chance = np.random.default_rng(seed)
        for index in range(1, 5):
            self.fake.name(journal.CALL_SITE, index, f"model.py:{100 + index} forward")
        operations = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
        self._operations = [schema.OPERATIONS.index(name) for name in operations]

    def step(self, seconds: float) -> None:
        """Write the collectives of `seconds` that end now, and the step."""
        fake, count = self.fake, self._per_step
        now = time.monotonic_ns()
        gaps = self._chance.lognormal(0, 0.4, count)
        arrivals = now - int(seconds * 1e9) + np.cumsum(gaps / gaps.sum() * seconds * 0.9e9)
        durations = self._chance.lognormal(np.log(3e6), 0.5, count)
        returns = self._chance.lognormal(np.log(60e3), 0.4, count)
        waits = np.where(self._chance.random(count) < 0.1, durations, 0)
        for place in range(count):
            size = EMBEDDING if place % LAYER == 0 else SIZES[place % 3]
            kind = place * 3 // count
            arrived = int(arrivals[place])
            fake.issue(
                state=schema.ENDED,
                arrived_ns=arrived,
                returned_ns=arrived + int(returns[place]),
                ended_ns=arrived + int(durations[place]),
                blocked_ns=int(waits[place]),
                input_bytes=size // 8 if kind == 0 else size,
                output_bytes=size // 8 if kind == 1 else size,
                step=fake.num_steps + 1,
                operation=self._operations[kind],
                reduce_op=0 if kind == 0 else 2,
                call_site=1 + place % LAYER % 4,
                flags=schema.FLAG_ASYNC | schema.FLAG_END_IS_UPPER_BOUND,
                issued_by=1,
                ended_by=1,
            )
        fake.step(
            started_ns=now - int(seconds * 1e9),
            ended_ns=now,
            **{
                name: int(seconds * 1e9 * share * self._chance.uniform(0.9, 1.1))
                for name, share in (
                    ("data_ns", 0.02), ("forward_ns", 0.3), ("backward_ns", 0.6),
                    ("optimizer_ns", 0.05), ("other_ns", 0.01), ("backward_blocked_ns", 0.05),
                    ("cpu_ns", 0.9), ("process_cpu_ns", 1.3), ("gc_ns", 0.001),
                )
            },
            num_collectives=count,
            minor_faults=int(self._chance.integers(0, 300)),
            voluntary_switches=int(self._chance.integers(0, 300)),
        )  # fmt: skip


def main(run: str, ranks: str, per_step: str, step_seconds: str, steps: str) -> None:
    load = [LoadRank(Path(run), rank, int(per_step), rank) for rank in range(int(ranks))]
    begun = time.monotonic()
    for number in range(1, int(steps) + 1):
        time.sleep(max(0.0, begun + number * float(step_seconds) - time.monotonic()))
        for rank in load:
            rank.step(float(step_seconds))
    for rank in load:
        rank.fake.says_ended(ring.CLEAN)


if __name__ == "__main__":
    main(*sys.argv[1:])
