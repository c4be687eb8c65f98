"""Jobs whose steps are known to the microsecond, as chunks; the truth beside them.

Each rank waits for its data, runs forward and backward, meets the others in one all_reduce and
steps its optimizer. Hosts may have clocks of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from tests.server.conftest import Sender

MS = 1_000_000
BEGIN_NS = 1_700_000_000 * 10**9
USUAL = {"data": 4.0, "forward": 30.0, "backward": 60.0, "optimizer": 6.0}
Change = Mapping[tuple[int, str], float]  # of a rank (-1: all) and a phase: ms more


@dataclass(kw_only=True)
class Job:
    """A data-parallel job; one step is another than all others."""

    ranks: int = 4
    steps: int = 30
    odd_step: int = 25
    more: Change = field(default_factory=dict)  # in the odd step
    always: Change = field(default_factory=dict)
    transfer_ms: float = 5.0
    odd_transfer_ms: float = 5.0
    hosts: int = 1
    ahead_ms: tuple[float, ...] = (0.0,)  # the clock of each host
    missing: tuple[tuple[int, int], ...] = ()  # ranks and steps
    stages: int = 0
    operation: str = "all_reduce"
    flags: int = 0  # of the odd step
    backend: str = "gloo"  # of "nccl" hosts only enqueue: they are never blocked
    rows: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        now = np.full(self.ranks, BEGIN_NS)
        for step in range(1, self.steps + 1):
            is_odd = step == self.odd_step
            transfer = round((self.odd_transfer_ms if is_odd else self.transfer_ms) * 1e3) * 1_000
            before = {}
            for rank in range(self.ranks):
                own = {
                    phase: round((ms * (1 + 0.004 * rng.standard_normal())) * 1e3) * 1_000
                    for phase, ms in USUAL.items()
                }
                for change in (self.always, *([self.more] if is_odd else [])):
                    for (who, phase), ms in change.items():
                        if who in (-1, rank):
                            own[phase] = own.get(phase, 0) + round(ms * 1e3) * 1_000
                self.rows[rank, step] = {"own": own, "started": int(now[rank])}
                before[rank] = sum(own.values()) - own["optimizer"]
                self.rows[rank, step]["arrived"] = int(now[rank]) + before[rank]
            end = max(row["arrived"] for (_, s), row in self.rows.items() if s == step) + transfer
            for rank in range(self.ranks):
                row = self.rows[rank, step]
                row["blocked"] = end - row["arrived"] if self.ranks > 1 else 0
                row["ended"] = row["arrived"] + row["blocked"]
                now[rank] = row["ended"] + row["own"]["optimizer"]
                row["length"] = int(now[rank]) - row["started"]

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return f"node-{rank * self.hosts // self.ranks}"

    def ahead_ns(self, rank: int) -> int:
        """Return by how much the clock of a rank is ahead."""
        return round(self.ahead_ms[rank * self.hosts // self.ranks % len(self.ahead_ms)] * MS)

    def records(self) -> list[Any]:
        """Return what comes before the steps."""
        found: list[Any] = [
            schema.RunStarted(
                attempt=0, rank=-1, time_ns=BEGIN_NS, name="job", command=[],
                world_size=self.ranks,
            ),
            schema.GroupDefined(
                attempt=0, rank=0, time_ns=BEGIN_NS, group="world", ranks=list(range(self.ranks)),
                backend="gloo",
            ),
        ]  # fmt: skip
        for rank in range(self.ranks):
            more: dict[str, Any] = {}
            if self.stages:
                more = {"stage": rank, "num_stages": self.stages, "num_microbatches": 4}
            found.append(
                schema.RankRegistered(
                    attempt=0, rank=rank, time_ns=BEGIN_NS, world_size=self.ranks,
                    local_rank=rank, local_world_size=self.ranks, node_rank=0,
                    host=self.host(rank), pid=rank + 1, backend=self.backend, **more,
                )
            )  # fmt: skip
        return found

    def chunks(self) -> list[schema.Chunk]:
        """Return the steps and operations of all ranks."""
        found = []
        for rank in range(self.ranks):
            mine = [
                (step, self.rows[rank, step])
                for step in range(1, self.steps + 1)
                if (rank, step) not in self.missing
            ]
            found.append(self._steps(rank, mine))
            if self.ranks > 1:
                found.append(self._calls(rank, mine))
        return found

    def _steps(self, rank: int, mine: list[tuple[int, dict[str, Any]]]) -> schema.Chunk:
        zero = np.zeros(len(mine), np.int64)
        columns: dict[str, Column] = dict.fromkeys(schema.STEP_COLUMNS, zero)
        for phase in ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation"):
            columns[f"{phase}_ns"] = np.array([row["own"].get(phase, 0) for _, row in mine])
        waits = np.array([row["blocked"] for _, row in mine])
        blocked = waits if self.backend == "gloo" else zero
        steps = np.array([step for step, _ in mine])
        flags = np.where(steps == self.odd_step, self.flags, 0)
        columns |= {
            "step": steps,
            "started_ns": np.array([row["started"] for _, row in mine]) + self.ahead_ns(rank),
            "duration_ns": np.array([row["length"] for _, row in mine]),
            "backward_ns": columns["backward_ns"] + waits,  # type: ignore[operator]
            "backward_blocked_ns": blocked, "microbatches": zero + 1,
            "num_collectives": zero + 1, "flags": flags,
        }  # fmt: skip
        return chunk("steps", rank, self.host(rank), "started_ns", columns)

    def _calls(self, rank: int, mine: list[tuple[int, dict[str, Any]]]) -> schema.Chunk:
        rows = [
            {
                "arrived_ns": row["arrived"] + self.ahead_ns(rank), "step": step,
                "duration_ns": row["blocked"], "sequence": step,
                "blocked_ns": row["blocked"] if self.backend == "gloo" else 0,
                "started_ns": row["blocked"] // 2 if self.backend == "nccl" else -1,
                "device_duration_ns": row["blocked"] // 2 if self.backend == "nccl" else -1,
                "size_bytes": 1 << 20, "peer_rank": 0 if self.operation == "broadcast" else -1,
            }
            for step, row in mine
        ]  # fmt: skip
        return call_chunk(rank, self.host(rank), rows, self.operation)


def call_chunk(
    rank: int, host: str, rows: list[dict[str, Any]], operation: str = "", group: str = "world"
) -> schema.Chunk:
    """Return a chunk of operations; what a row does not say is as usual."""
    usual = {"state": schema.ENDED, "flags": 0, "num_tensors": 1, "peer_rank": -1}
    columns: dict[str, Column] = {
        name: np.array([row.get(name, usual.get(name, -1)) for row in rows], np.int64)
        for name in schema.COLLECTIVE_COLUMNS
        if name not in schema.STRING_COLUMNS
    }
    words = {"group": group, "operation": operation, "dtype": "float32", "reduce_op": "sum"}
    for name in schema.STRING_COLUMNS & set(schema.COLLECTIVE_COLUMNS):
        columns[name] = [str(row.get(name, words.get(name, "x"))) for row in rows]
    return chunk("collectives", rank, host, "arrived_ns", columns)


def chunk(
    kind: Any, rank: int, host: str, time_column: str, columns: dict[str, Column], attempt: int = 0
) -> schema.Chunk:
    """Return a chunk of columns."""
    at, steps = np.asarray(columns[time_column]), np.asarray(columns["step"])
    return schema.Chunk(
        kind=kind, attempt=attempt, rank=rank, host=host, count=len(at),
        time_lo_ns=int(at.min()), time_hi_ns=int(at.max()), step_lo=int(steps.min()),
        step_hi=int(steps.max()), data=encode_chunk(columns),
    )  # fmt: skip


def pipeline(sender: Sender, steps: int = 1, slow_step: int = 0, slow_ms: float = 0.0) -> None:
    """Send steps of three stages and three microbatches, GPipe: 10 ms forward, 20 ms back.

    In the slow step what goes from stage 1 to stage 2 takes longer.
    """
    sender.send(*Job(ranks=3, stages=3).records())
    for step in range(1, steps + 1):
        begin_ns = BEGIN_NS + (step - 1) * 1_000 * MS
        calls, free = _exchanged(step, begin_ns, slow_ms if step == slow_step else 0.0)
        for stage in range(3):
            blocked = sum(one["blocked_ns"] for one in calls[stage])
            known = {
                "step": step, "started_ns": begin_ns, "forward_ns": 30 * MS,
                "duration_ns": round((free[stage] + 5) * MS), "backward_ns": 60 * MS + blocked,
                "backward_blocked_ns": blocked, "optimizer_ns": 5 * MS, "microbatches": 3,
                "num_collectives": len(calls[stage]),
            }  # fmt: skip
            columns = {name: np.array([known.get(name, 0)]) for name in schema.STEP_COLUMNS}
            rows = sorted(calls[stage], key=lambda one: one["arrived_ns"])
            sender.send(
                chunks=[
                    chunk("steps", stage, "node-0", "started_ns", dict(columns)),
                    call_chunk(stage, "node-0", rows),
                ]
            )


def _exchanged(
    step: int, begin_ns: int, slow_ms: float
) -> tuple[dict[int, list[dict[str, Any]]], list[float]]:
    """Return what each stage sent and received in a step, and when it was done, ms."""
    free, calls = [0.0] * 3, defaultdict(list)

    def call(
        rank: int, word: str, peer: int, at: float, end: float, blocked: float, n: int
    ) -> None:
        calls[rank].append({
            "arrived_ns": begin_ns + round(at * MS), "duration_ns": round((end - at) * MS),
            "blocked_ns": round(blocked * MS), "sequence": 3 * (step - 1) + n + 1, "step": step,
            "size_bytes": 4096, "peer_rank": peer, "operation": word, "flags": schema.FLAG_P2P,
        })  # fmt: skip

    for order, work in (([0, 1, 2], 10.0), ([2, 1, 0], 20.0)):
        done = np.zeros((3, 3))
        way = order[1] - order[0]
        for n in range(3):
            for stage in order:
                if 0 <= stage - way < 3:
                    takes = 1.0 + (slow_ms if (stage, way) == (2, 1) else 0.0)
                    at, came = free[stage], float(done[stage - way, n]) + takes
                    free[stage] = max(at, came)
                    call(stage, "recv", stage - way, at, free[stage], free[stage] - at, n)
                free[stage] += work
                done[stage, n] = free[stage]
                if 0 <= stage + way < 3:
                    end = free[stage] + (50.0 if slow_ms else 0.5)
                    call(stage, "send", stage + way, free[stage], end, 0.0, n)
    return calls, free
