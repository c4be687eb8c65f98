"""A rank without torch that records until a file appears, and then says what it wrote.

    python steady_rank.py RUN_DIRECTORY RANK RATE STOP_FILE

It prints one JSON object: the last sequence of each group, the number of steps, of log lines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rankscope.files import journal, ring
from tests.agent.collector.fake_rank import FakeRank

GROUPS = ("0", "tensor parallel", "data parallel")
PER_STEP = 10
IN_FLIGHT = 3  # collectives that are open at any time


def main(run: str, rank: str, rate: str, stop: str) -> None:
    fake = FakeRank(Path(run), int(rank))
    for index, name in enumerate(GROUPS, 1):
        fake.name(journal.GROUP, index, name)
    sequences = dict.fromkeys(GROUPS, 0)
    lines, begun, pending = 0, time.monotonic(), list[int]()
    while not Path(stop).exists() or fake.count % PER_STEP:
        index = fake.count % len(GROUPS)
        sequences[GROUPS[index]] += 1
        pending.append(
            fake.issue(
                sequence=sequences[GROUPS[index]], group_id=index + 1, step=fake.num_steps + 1
            )
        )
        if len(pending) > IN_FLIGHT:
            fake.end(pending.pop(0))
        if fake.count % PER_STEP == 0:
            fake.step()
            fake.say(f"line-{rank}-{lines}-end")
            lines += 1
        time.sleep(max(0.0, begun + fake.count / float(rate) - time.monotonic()))
    for number in pending:
        fake.end(number)
    fake.says_ended(ring.CLEAN)
    wrote = {"sequences": sequences, "steps": fake.num_steps, "lines": lines}
    sys.stdout.write(json.dumps(wrote))


if __name__ == "__main__":
    main(*sys.argv[1:])
