"""A healthy job, and how its ranks fail: exceptions, ends, echoes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import msgspec

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import CALM, MS, START_NS, Item, Job, apply, record

ECHOES = (
    ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
     "peer [127.0.0.1]:48213"),
    ("torch.distributed.DistBackendError", "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils"
     ".hpp:275, remote process exited or there was a network error"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
)  # fmt: skip


def run(num_ranks: int = 4, num_hosts: int = 1) -> RunState:
    recording = record(Job(num_ranks=num_ranks, num_hosts=num_hosts, noise=CALM, steps=45))
    state = RunState("run")
    apply(state, recording.items())
    apply(state, recording.states(recording.last_ms))
    return state


def at(milliseconds: float) -> int:
    return START_NS + int((60_000 + milliseconds) * MS)


def raised(rank: int, ms: float, kind: str, message: str) -> schema.ErrorRaised:
    return schema.ErrorRaised(
        attempt=0, rank=rank, time_ns=at(ms), type=kind, message=message, step=41,
        traceback=f'Traceback\n  File "train.py", line 7\n{kind}: {message}',
    )  # fmt: skip


def ended(rank: int, ms: float, **how: object) -> schema.RankEnded:
    return schema.RankEnded(attempt=0, rank=rank, time_ns=at(ms), last_step=41, **how)  # type: ignore[arg-type]


def look_after(state: RunState, records: list[schema.AnyRecord], seed: int = 0) -> Look:
    random.Random(seed).shuffle(records)
    for one in [*records, *records[:3]]:
        state.apply_record(one)
    return state.look(at(10_000))


def in_attempt(number: int, items: Iterable[Item], later_ms: float) -> Iterator[Item]:
    """Yield records and steps of a recording as those of an attempt that began so much later."""
    by = int(later_ms * MS)
    for arrival, what in items:
        if not isinstance(what, tuple):
            yield (
                arrival + by,
                msgspec.structs.replace(what, attempt=number, time_ns=what.time_ns + by),
            )
        elif what[0].kind == "steps":
            chunk, columns = what
            moved = msgspec.structs.replace(
                chunk, attempt=number, time_lo_ns=chunk.time_lo_ns + by,
                time_hi_ns=chunk.time_hi_ns + by,
            )  # fmt: skip
            yield arrival + by, (moved, columns | {"started_ns": columns["started_ns"] + by})
