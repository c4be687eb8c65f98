"""Dumps of the Flight Recorder in the shape that PyTorch gives them, made for a fake rank."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rankscope.files import ring
from rankscope.wire import schema
from tests.agent.collector.fake_rank import FakeRank

LATE_NS = 40_000_000  # how late the watchdog sees an end; up to 100 ms by its period
NAMES = {
    "all_reduce": "nccl:all_reduce",
    "all_gather_into_tensor": "nccl:_all_gather_base",
    "reduce_scatter_tensor": "nccl:_reduce_scatter_base",
    "broadcast": "nccl:broadcast",
    "all_to_all_single": "nccl:all_to_all",
    "barrier": "nccl:all_reduce_barrier",
    "all_gather": "nccl:_broadcast_oop",
}


def operation(name: str) -> int:
    """Return the number that a slot has for an operation."""
    return schema.OPERATIONS.index(name)


class Recorder:
    """A Flight Recorder of NCCL beside a fake rank: `call` writes a slot and an entry."""

    def __init__(self, fake: FakeRank) -> None:
        self.fake = fake
        self.entries: list[dict[str, Any]] = []
        self.slot_of: dict[int, int] = {}  # record_id -> slot number
        self.sequences: dict[tuple[str, bool], int] = {}
        self.records = 0
        self.pg_config: dict[str, dict[str, str]] = {}
        self.between_ns = 30_000
        self.now = time.monotonic_ns() - 10_000_000_000
        self.wall_ahead = time.time_ns() - time.monotonic_ns()

    def call(self, name: str = "all_reduce", *, group: str = "0", pg_id: int = 0,
             sequence: int = 0, group_id: int = 1) -> dict[str, Any]:  # fmt: skip
        """Issue a collective; both sides see it."""
        number = self.slot(name, sequence=sequence, group_id=group_id)
        entry = self.entry(NAMES[name], group=group, pg_id=pg_id)
        self.slot_of[entry["record_id"]] = number
        return entry

    def slot(self, name: str, *, sequence: int = 0, group_id: int = 1, peer_rank: int = -1,
             flags: int = schema.FLAG_ASYNC) -> int:  # fmt: skip
        """Write a slot alone: the call takes a third of the time between two calls."""
        self.now += self.between_ns
        return self.fake.issue(
            state=schema.RETURNED, arrived_ns=self.now, returned_ns=self.now + self.between_ns // 3,
            sequence=sequence or self.fake.count + 1, operation=operation(name),
            group_id=group_id, peer_rank=peer_rank, flags=flags,
        )  # fmt: skip

    def entry(self, name: str, *, group: str = "0", pg_id: int = 0, is_p2p: bool = False,
              same_batch: bool = False) -> dict[str, Any]:  # fmt: skip
        """Write an entry alone, as a call that returns a moment later would."""
        key = (f"{pg_id} {group}", is_p2p)
        self.sequences[key] = self.sequences.get(key, 0) + (not same_batch)
        other = self.sequences.get((f"{pg_id} {group}", not is_p2p), 0)
        mine = self.sequences[key]
        self.entries.append(
            {
                "record_id": self.records, "pg_id": pg_id, "process_group": [group, "default_pg"],
                "collective_seq_id": other if is_p2p else mine,
                "p2p_seq_id": mine if is_p2p else other, "op_id": self.records + 1,
                "profiling_name": name, "is_p2p": is_p2p, "state": "scheduled", "retired": False,
                "time_created_ns": self.now + self.between_ns // 6 + self.wall_ahead,
                "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0,
                "input_sizes": [[4096, 1, 5120]], "input_dtypes": ["BFloat16"],
                "output_sizes": [[4096, 1, 5120]], "output_dtypes": ["BFloat16"],
                "thread_id": "23456244340032", "thread_name": "python3", "timeout_ms": 600000,
            }
        )  # fmt: skip
        self.records += 1
        return self.entries[-1]

    def complete(self, entries: Iterable[dict[str, Any]], duration_ms: float | None = 2.5) -> None:
        """The device is done; the watchdog has seen it."""
        for entry in entries:
            ended = entry["time_created_ns"] + LATE_NS
            entry |= {
                "state": "completed", "retired": True, "time_discovered_started_ns": ended,
                "time_discovered_completed_ns": ended,
            }  # fmt: skip
            if duration_ms is not None:
                entry["duration_ms"] = duration_ms

    def dump(self) -> dict[str, Any]:
        """Return the answer of dump_nccl_trace_json."""
        status = {"last_enqueued_collective": "7", "last_started_collective": "-1"}
        return {
            "version": "2.10", "comm_lib_version": "2.27.3", "nccl_comm_state": {},
            "pg_config": self.pg_config, "pg_status": {
                "0": status | {"last_completed_collective": "5"}
            }, "entries": self.entries,
        }  # fmt: skip

    def slots(self) -> Any:
        """Return all slots of the fake rank."""
        import numpy as np

        reader = ring.RingReader(self.fake.ring.path, ring.COLLECTIVE_FIELDS)
        return reader.read(np.arange(self.fake.count))[0]
