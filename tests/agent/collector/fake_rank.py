"""A rank without torch: writes a ring and a journal as the agent does, at a given rate.

    python fake_rank.py RUN_DIRECTORY RANK COUNT RATE END

END is how it goes: clean, exception, code3, kill, wait (until killed), unfinished (waits with the
last collective open), stuck (the same, and answers the stack signal), crash (a segmentation fault
with faulthandler on), out_of_memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from rankscope.files import journal, ring, run_directory
from rankscope.wire import schema

ALL_REDUCE = schema.OPERATIONS.index("all_reduce")
FLOAT32 = schema.DTYPES.index("float32")
RINGS = {
    run_directory.COLLECTIVES_RING: ring.COLLECTIVE_SLOT.size,
    run_directory.STEPS_RING: ring.STEP_SLOT.size,
}


class FakeRank:
    """The files of one rank."""

    def __init__(
        self, run: Path, rank: int, *, attempt: int = 0, num_slots: int = 16384, pid: int = 0
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self.directory = run_directory.rank_directory(run, attempt, rank, pid or os.getpid())
        self.directory.mkdir(parents=True)
        self.journal = journal.JournalWriter(self.directory)
        self.rings = [
            ring.RingWriter(
                self.directory / name, size, num_slots, attempt=attempt, rank=rank, world_size=4,
                local_rank=rank,
            )
            for name, size in RINGS.items()
        ]  # fmt: skip
        self.ring, self.steps = self.rings
        self.count = self.num_steps = 0
        self.name(journal.GROUP, 1, "0")
        self.name(journal.CALL_SITE, 1, "train.py:12 train")

    def name(self, kind: int, index: int, text: str) -> None:
        self.journal.append(kind, journal.INDEXED.pack(index) + text.encode())

    def say(self, message: str) -> None:
        self.record(
            schema.LogLine(
                attempt=self.attempt, rank=self.rank, time_ns=time.time_ns(), level=20,
                message=message,
            )
        )  # fmt: skip

    def record(self, record: schema.Record) -> None:
        self.journal.append(journal.RECORD, schema.encode(record))

    def issue(self, *, state: int = schema.ISSUED, **fields: int) -> int:
        """Write the next slot and return its number."""
        number, now = self.count, time.monotonic_ns()
        self.count += 1
        values = {name: 0 for name, _, _ in ring.COLLECTIVE_FIELDS} | {
            "arrived_ns": now, "input_bytes": 4096, "output_bytes": 4096,
            "sequence": number + 1, "step": 1,
            "peer_rank": -1, "call_site": 1, "group_id": 1, "num_tensors": 1,
            "operation": ALL_REDUCE, "state": state, "dtype": FLOAT32,
        } | fields  # fmt: skip
        at = self.ring.offset(number)
        ring.U64.pack_into(self.ring.buffer, at, 0)
        ring.COLLECTIVE_SLOT.pack_into(self.ring.buffer, at, *values.values())
        ring.U64.pack_into(self.ring.buffer, at, number + 1)
        ring.U64.pack_into(self.ring.buffer, ring.HEAD_AT, number + 1)
        ring.U64.pack_into(self.ring.buffer, ring.HEARTBEAT_AT, now)
        return number

    def end(self, number: int, *, ended_ns: int = 0) -> None:
        """Say that a collective ended."""
        at = self.ring.offset(number)
        fields = ring.COLLECTIVE_FIELDS
        now = ended_ns or time.monotonic_ns()
        ring.U64.pack_into(self.ring.buffer, at + ring.field_offset(fields, "ended_ns"), now)
        self.ring.buffer[at + ring.field_offset(fields, "state")] = schema.ENDED

    def step(self, **fields: int) -> None:
        """Write a step and begin the next one."""
        self.num_steps += 1
        now = time.monotonic_ns()
        values = {name: 0 for name, _, _ in ring.STEP_FIELDS} | {
            "started_ns": now - 10_000_000, "ended_ns": now, "forward_ns": 4_000_000,
            "step": self.num_steps, "microbatches": 1,
        } | fields  # fmt: skip
        at = self.steps.offset(self.num_steps - 1)
        ring.STEP_SLOT.pack_into(self.steps.buffer, at, *values.values())
        ring.U64.pack_into(self.steps.buffer, at, self.num_steps)
        ring.U64.pack_into(self.steps.buffer, ring.HEAD_AT, self.num_steps)
        ring.U64.pack_into(self.ring.buffer, ring.STEP_AT, self.num_steps + 1)
        self.ring.renew_clock()
        self.steps.renew_clock()

    def says_ended(self, how: int) -> None:
        self.ring.buffer[ring.ENDED_AT] = how


def main(run: str, rank: str, count: str, rate: str, end: str) -> None:
    fake = FakeRank(Path(run), int(rank))
    begun = time.monotonic()
    for number in range(int(count)):
        fake.end(fake.issue())
        if number % 10 == 9:
            fake.step()
            fake.say(f"rank {rank} line {number // 10}")
        time.sleep(max(0.0, begun + number / float(rate) - time.monotonic()))
    if end in ("unfinished", "stuck"):
        fake.issue()
    if end == "stuck":
        stacks = (fake.directory / run_directory.STACKS).open("a")
        faulthandler.register(signal.SIGRTMIN + 5, file=stacks, all_threads=True, chain=False)
        fake.ring.buffer[ring.STACK_SIGNAL_AT] = signal.SIGRTMIN + 5
    if end == "crash":
        faulthandler.enable(file=(fake.directory / run_directory.FATAL).open("a"))
        ctypes.string_at(0)
    ballast = []
    while end == "out_of_memory":
        ballast.append(b"x" * (1 << 20))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end in ("wait", "unfinished", "stuck"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        time.sleep(600)
    fake.says_ended(ring.EXCEPTION if end == "exception" else ring.CLEAN)
    sys.exit({"exception": 1, "code3": 3}.get(end, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
