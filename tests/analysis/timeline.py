"""Jobs in simulated time with everything that the agent records of operations.

Each rank runs a list of operations; who waits for whom, and for how long, comes out of the run.
This runs apart from the product's replay, on purpose: it is what the replay is measured with.
Times are milliseconds; every host's clock is off by its own error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.diagnose.attempt import AttemptState
from tests.analysis.records import grouped
from tests.analysis.simulator import MS, START_NS, Item


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that a rank does."""

    kind: str  # "compute", "issue", "wait", "send", "recv"; a wait is for all that is open
    ms: float = 0.0  # of compute; of an issue, send or recv the time of the transfer
    phase: str = "forward"
    group: str = "world"
    peer: int = -1
    size_bytes: int = 4 << 20
    operation: str = "all_reduce"


@dataclass(slots=True)
class Event:
    """An operation of one rank."""

    act: Act
    step: int
    issued_ms: float
    sequence: int
    ended_ms: float = math.inf
    blocked_ms: float = 0.0


@dataclass(slots=True)
class Rank:
    """A rank while it runs, and what it leaves."""

    number: int
    now_ms: float = 0.0
    acts: deque[Act] = field(default_factory=deque)
    open: list[Event] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    counts: dict[object, int] = field(default_factory=dict)


Program = Callable[[int, int], Sequence[Act]]  # rank, step -> what it does


class Timeline:
    """Runs `program(rank, step)` for all ranks and steps (from 1)."""

    def __init__(
        self, num_ranks: int, steps: int, program: Program, groups: dict[str, tuple[int, ...]]
    ) -> None:
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.groups, self.num_steps = groups, steps
        self._program = program
        self._together: dict[object, list[Event]] = {}
        self._busy: dict[str, float] = {}  # group -> end of its last transfer

    def run(self) -> Timeline:
        """Run until all ranks are through; raise where none can go on."""
        waiting = deque(self.ranks)
        idle = 0
        while waiting:
            rank = waiting.popleft()
            idle = 0 if self._advance(rank) else idle + 1
            if rank.acts or len(rank.steps) < self.num_steps:
                waiting.append(rank)
            assert idle <= len(self.ranks), "the program waits for itself"
        for rank in self.ranks:
            self._end_step(rank)
        return self

    def _advance(self, rank: Rank) -> bool:
        moved = False
        while True:
            if not rank.acts:
                if len(rank.steps) == self.num_steps:
                    return moved
                self._end_step(rank)
                step = len(rank.steps) + 1
                rank.acts.extend(self._program(rank.number, step))
                rank.steps.append({"started": rank.now_ms, "step": step})
            if not self._do(rank, rank.acts[0]):
                return moved
            rank.acts.popleft()
            moved = True

    @staticmethod
    def _end_step(rank: Rank) -> None:
        if rank.steps and "ended" not in rank.steps[-1]:
            rank.steps[-1]["ended"] = rank.now_ms

    def _do(self, rank: Rank, act: Act) -> bool:
        log = rank.steps[-1]
        if act.kind == "compute":
            rank.now_ms += act.ms
            log[act.phase] = log.get(act.phase, 0.0) + act.ms
            return True
        if act.kind == "wait":
            return self._wait(rank, act)
        pair = (rank.number, act.peer) if act.kind == "send" else (act.peer, rank.number)
        key: object = act.group if act.kind == "issue" else pair
        count = rank.counts[key] = rank.counts.get(key, 0) + 1
        event = Event(act, len(rank.steps), rank.now_ms, count)
        rank.open.append(event)
        rank.events.append(event)
        members = self._together.setdefault((key, count), [])
        members.append(event)
        if len(members) == (len(self.groups[act.group]) if act.kind == "issue" else 2):
            begin = max(member.issued_ms for member in members)
            if act.kind == "issue":
                begin = max(begin, self._busy.get(act.group, 0.0))
            ended = begin + max(member.act.ms for member in members)
            if act.kind == "issue":
                self._busy[act.group] = ended
            for member in members:
                member.ended_ms = ended
        return True

    def _wait(self, rank: Rank, act: Act) -> bool:
        if any(math.isinf(event.ended_ms) for event in rank.open):
            return False
        log = rank.steps[-1]
        for event in rank.open:
            event.blocked_ms = max(0.0, event.ended_ms - rank.now_ms)
            rank.now_ms += event.blocked_ms
            for name in (act.phase, f"{act.phase}_blocked"):
                log[name] = log.get(name, 0.0) + event.blocked_ms
        rank.open = []
        return True

    # --- what the agents send ----------------------------------------------------------------

    def step_ms(self, skip: int = 5) -> float:
        """Return the mean step, without the first ones."""
        ends = np.array([[s["ended"] for s in rank.steps] for rank in self.ranks]).max(axis=0)
        return float((ends[-1] - ends[skip]) / (len(ends) - 1 - skip))

    def items(
        self,
        *,
        stages: Sequence[int] = (),
        microbatches: int = 0,
        hosts: int = 1,
        clock_error_ms: float = 0.0,
        per_chunk: int = 10,
        schedule: str = "",
        extra: Callable[[int, int], dict[str, int]] | None = None,
        dtype: str = "float32",
    ) -> list[Item]:
        """Return records and chunks in order of arrival. `extra` adds columns of a step."""
        items: list[Item] = []
        num_ranks = len(self.ranks)
        for rank in self.ranks:
            host = rank.number * hosts // num_ranks
            shift = START_NS + int(((host * 7919) % 5 - 2) / 2 * clock_error_ms * MS)
            who = {"attempt": 0, "rank": rank.number, "time_ns": shift}
            items.append((START_NS, schema.RankRegistered(
                **who, world_size=num_ranks, local_rank=rank.number,
                local_world_size=num_ranks // hosts, node_rank=host, host=f"node-{host}",
                pid=1000 + rank.number, stage=stages[rank.number] if stages else -1,
                num_stages=max(stages) + 1 if stages else 0, num_microbatches=microbatches,
                schedule=schedule,
            )))  # fmt: skip
            items += [
                (START_NS, grouped(**who, ranks=ranks, group=name, backend=""))
                for name, ranks in self.groups.items()
                if rank.number in ranks
            ]
            for begin in range(0, len(rank.steps), per_chunk):
                part = rank.steps[begin : begin + per_chunk]
                arrival = START_NS + int(part[-1]["ended"] * MS)
                rows = [_step_row(rank.number, log, shift, extra) for log in part]
                items.append((arrival, _chunk("steps", rank.number, rows, schema.STEP_COLUMNS)))
                lo, hi = part[0]["step"], part[-1]["step"]
                events = [e for e in rank.events if lo <= e.step <= hi]
                if events:
                    found = [_event_row(e, shift, dtype) for e in events]
                    items.append((arrival, _chunk("collectives", rank.number, found,
                                                  schema.COLLECTIVE_COLUMNS)))  # fmt: skip
        return sorted(items, key=lambda item: item[0])


def _step_row(
    rank: int,
    log: dict[str, float],
    shift: int,
    extra: Callable[[int, int], dict[str, int]] | None,
) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(schema.STEP_COLUMNS, 0)
    for phase in ("data", "forward", "backward", "optimizer", "other"):
        row[f"{phase}_ns"] = int(log.get(phase, 0.0) * MS)
        if phase != "data":
            row[f"{phase}_blocked_ns"] = int(log.get(f"{phase}_blocked", 0.0) * MS)
    took = log["ended"] - log["started"]
    row |= {
        "step": int(log["step"]),
        "started_ns": shift + int(log["started"] * MS),
        "duration_ns": int(took * MS),
        "cpu_ns": int(0.4 * took * MS),
        "flags": schema.STEP_FIRST if log["step"] == 1 else 0,
    }
    if extra is not None:
        row |= extra(rank, int(log["step"]))
    return row


def _event_row(event: Event, shift: int, dtype: str) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(schema.COLLECTIVE_COLUMNS, 0)
    act = event.act
    row |= {
        "arrived_ns": shift + int(event.issued_ms * MS),
        "started_ns": -1,
        "duration_ns": int((event.ended_ms - event.issued_ms) * MS),
        "device_duration_ns": -1,
        "returned_ns": 1000,
        "blocked_ns": int(event.blocked_ms * MS),
        "sequence": event.sequence,
        "step": event.step,
        "peer_rank": act.peer,
        "num_tensors": 1,
        "state": schema.ENDED,
        "flags": schema.FLAG_ASYNC | (schema.FLAG_P2P if act.peer >= 0 else 0),
        "group": act.group,
        "operation": act.operation if act.kind == "issue" else act.kind,
        "dtype": dtype,
        "reduce_op": "sum",
        "call_site": "",
        "issued_by": "probe",
        "ended_by": "future",
    }
    for name in ("size_bytes", "input_bytes", "output_bytes"):
        row[name] = act.size_bytes
    return row


def _chunk(
    kind: schema.ChunkKind, rank: int, rows: list[dict[str, object]], names: Sequence[str]
) -> tuple[schema.Chunk, dict[str, Column]]:
    columns: dict[str, Column] = {
        name: [str(row[name]) for row in rows]
        if name in schema.STRING_COLUMNS
        else np.array([row[name] for row in rows], np.int64)
        for name in names
    }
    times = np.asarray(columns["started_ns" if kind == "steps" else "arrived_ns"])
    lo, hi = int(times.min()), int(times.max())
    is_read = kind == "collectives"  # of steps the columns are all that is
    return schema.Chunk(
        kind=kind, attempt=0, rank=rank, host="", count=len(rows), time_lo_ns=lo, time_hi_ns=hi,
        data=encode_chunk(columns) if is_read else f"{kind} {rank} {lo}".encode(),
    ), columns  # fmt: skip


# --- programs --------------------------------------------------------------------------------

Work = Callable[[int, int], float]  # rank, step -> factor of its usual work


def data_parallel(
    forward_ms: float,
    backward_ms: float,
    buckets: int,
    transfer_ms: float,
    factor: Work,
    size_bytes: int = 25 << 20,
) -> Program:
    """Return DDP: buckets are issued while backward goes on, and waited for at its end."""

    def program(rank: int, step: int) -> list[Act]:
        slow = factor(rank, step)
        acts = [Act("compute", 0.3, "data"), Act("compute", forward_ms * slow, "forward")]
        for _ in range(buckets):
            acts.append(Act("compute", backward_ms * slow / buckets, "backward"))
            acts.append(Act("issue", transfer_ms, "backward", size_bytes=size_bytes))
        return [*acts, Act("wait", phase="backward"), Act("compute", 2.0, "optimizer")]

    return program


def ddp(
    forward_ms: float,
    backward_ms: float,
    sizes: Sequence[float],
    model: Callable[[float], float],
    factor: Work,
    microbatches: int = 1,
    every_microbatch: bool = True,
    cast_ms: float = 0.0,
) -> Program:
    """Return DDP with buckets of these bytes; gradients become ready at an even pace.

    `model(bytes)` is the time of a transfer.
    """
    total = sum(sizes)

    def program(rank: int, step: int) -> list[Act]:
        slow = factor(rank, step) / microbatches
        acts = [Act("compute", 0.3, "data")]
        for number in range(microbatches):
            acts.append(Act("compute", forward_ms * slow, "forward"))
            for size in sizes:
                acts.append(Act("compute", backward_ms * slow * size / total, "backward"))
                if every_microbatch or number == microbatches - 1:
                    acts.append(Act("issue", model(size), "backward", size_bytes=int(size)))
            acts.append(Act("wait", phase="backward"))
        return [*acts, Act("compute", 2.0 + cast_ms, "optimizer")]

    return program


@dataclass(slots=True)
class Stage:
    """Writes down what one stage of a pipeline does."""

    rank: int
    stage: int
    num_stages: int
    forward_ms: float
    transfer_ms: float
    acts: list[Act] = field(default_factory=list)

    def compute(self, phase: str) -> None:
        """Forward, or backward, which takes twice as long."""
        self.acts.append(Act("compute", self.forward_ms * (1 + (phase == "backward")), phase))

    def move(self, phase: str, **what: int) -> None:
        """Exchange with neighbours and wait: send=1 to the next stage, recv=-1 from the last."""
        inside = {kind: shift for kind, shift in what.items()
                  if 0 <= self.stage + shift < self.num_stages}  # fmt: skip
        for kind, shift in inside.items():
            self.acts.append(Act(kind, self.transfer_ms, phase, group="pp", peer=self.rank + shift))
        if inside:
            self.acts.append(Act("wait", phase=phase))

    def gpipe(self, microbatches: int) -> None:
        """All forwards, then all backwards."""
        for _ in range(microbatches):
            self.move("forward", recv=-1)
            self.compute("forward")
            self.move("forward", send=1)
        for _ in range(microbatches):
            self.move("backward", recv=1)
            self.compute("backward")
            self.move("backward", send=-1)

    def one_forward_one_backward(self, microbatches: int) -> None:
        """Forwards ahead as many as there are stages behind, then in turns."""
        ahead = min(self.num_stages - 1 - self.stage, microbatches)
        for _ in range(ahead):
            self.move("forward", recv=-1)
            self.compute("forward")
            self.move("forward", send=1)
        self.move("forward", recv=-1)
        for number in range(microbatches - ahead):
            self.compute("forward")
            self.move("backward", send=1, recv=1)
            self.compute("backward")
            if number < microbatches - ahead - 1:
                self.move("backward", send=-1, recv=-1)
            else:
                self.move("backward", send=-1)
        for _ in range(ahead):
            self.move("backward", recv=1)
            self.compute("backward")
            self.move("backward", send=-1)


def pipeline(
    stages: int,
    microbatches: int,
    schedule: str,
    work_ms: Callable[[int, int], float],
    transfer_ms: float,
    replicas: int = 1,
    optimizer_ms: float = 2.0,
    reduce_ms: float = 1.0,
) -> Program:
    """Return GPipe or 1F1B; `work_ms(rank, step)` is forward of one microbatch, backward twice it.

    Rank = replica * stages + stage.
    """

    def program(rank: int, step: int) -> list[Act]:
        stage = Stage(rank, rank % stages, stages, work_ms(rank, step), transfer_ms)
        stage.acts.append(Act("compute", 0.2, "data"))
        run = stage.gpipe if schedule == "gpipe" else stage.one_forward_one_backward
        run(microbatches)
        acts = stage.acts
        if replicas > 1:
            group = f"dp-{stage.stage}"
            acts += [Act("issue", reduce_ms, group=group), Act("wait", phase="backward")]
        acts.append(Act("issue", 0.2, group="world", size_bytes=4))
        return [*acts, Act("wait", phase="optimizer"), Act("compute", optimizer_ms, "optimizer")]

    return program


def groups_of(stages: int, replicas: int) -> dict[str, tuple[int, ...]]:
    """Return the groups of a pipeline job."""
    ranks = stages * replicas
    found = {"world": tuple(range(ranks)), "pp": tuple(range(ranks))}
    for stage in range(stages if replicas > 1 else 0):
        found[f"dp-{stage}"] = tuple(range(stage, ranks, stages))
    return found


def noisy(seed: int, ranks: int, steps: int, sigma: float = 0.03) -> np.ndarray:
    """Return log-normal factors, ranks x (steps + 1)."""
    return np.exp(np.random.default_rng(seed).normal(0, sigma, (ranks, steps + 1)))


def attempt_of(items: Sequence[Item]) -> AttemptState:
    state = AttemptState("run", 0)
    for _, what in items:
        if isinstance(what, tuple):
            state.apply_chunk(*what)
        else:
            state.apply_record(what)
    state.take_waiting()
    return state
