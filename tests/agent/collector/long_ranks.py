"""Ranks that write hours of a run in seconds, in many groups and from many call sites.

python long_ranks.py RUN_DIRECTORY ATTEMPT RANKS STEPS STEPS_PER_SECOND
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from rankscope.files import journal, ring
from rankscope.wire import schema
from tests.agent.collector.fake_rank import ALL_REDUCE, FLOAT32, FakeRank

PER_STEP = 50
GROUPS, CALL_SITES = 40, 2000
LINE = "a line of some length that says something of step {} " + "and some more " * 20
_SLOT = np.dtype([(name, form) for name, form, _ in ring.COLLECTIVE_FIELDS])


class LongRank:
    """One rank; writes a step at once, without a Python loop over its collectives."""

    def __init__(self, run: Path, attempt: int, rank: int) -> None:
        self.fake = FakeRank(run, rank, attempt=attempt)
        buffer, slots = self.fake.ring.buffer, self.fake.ring.num_slots
        self._slots = np.frombuffer(buffer, _SLOT, slots, ring.HEADER_BYTES)
        for index in range(1, GROUPS + 1):
            self.fake.name(journal.GROUP, index, f"group {attempt} {index}")
        for index in range(1, CALL_SITES + 1):
            self.fake.name(journal.CALL_SITE, index, f"model_{attempt}.py:{index} layer_{index}")

    def step(self) -> None:
        """Write PER_STEP collectives, a step and a line."""
        fake = self.fake
        numbers = np.arange(fake.count, fake.count + PER_STEP)
        now = time.monotonic_ns()
        block = np.zeros(PER_STEP, _SLOT)
        block["number"] = numbers + 1
        block["arrived_ns"] = now - 2_000_000_000 + (numbers - fake.count) * 1_000_000
        block["returned_ns"] = block["arrived_ns"] + 50_000
        block["ended_ns"] = block["arrived_ns"] + 900_000 + numbers * 7919 % 100_000
        block["input_bytes"] = block["output_bytes"] = 4096 * (1 + numbers % 7)
        block["sequence"] = numbers // GROUPS + 1
        block["group_id"] = numbers % GROUPS + 1
        block["call_site"] = numbers % CALL_SITES + 1
        block["step"], block["state"] = fake.num_steps + 1, schema.ENDED
        block["peer_rank"], block["num_tensors"] = -1, 1
        block["operation"], block["dtype"] = ALL_REDUCE, FLOAT32
        self._slots[numbers % len(self._slots)] = block
        fake.count += PER_STEP
        ring.U64.pack_into(fake.ring.buffer, ring.HEAD_AT, fake.count)
        fake.step(num_collectives=PER_STEP)
        fake.say(LINE.format(fake.num_steps))


def main(run: str, attempt: str, ranks: str, steps: str, rate: str) -> None:
    every = [LongRank(Path(run), int(attempt), rank) for rank in range(int(ranks))]
    begun = time.monotonic()
    for number in range(int(steps)):
        for rank in every:
            rank.step()
        time.sleep(max(0.0, begun + number / float(rate) - time.monotonic()))
    time.sleep(1.0)  # the last ones are as old as final ones are
    for rank in every:
        rank.fake.says_ended(ring.CLEAN)


if __name__ == "__main__":
    main(*sys.argv[1:])
