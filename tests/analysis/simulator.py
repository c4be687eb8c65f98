"""Simulated jobs: the records and chunks that agents would send, with a manifest of the truth.

Noise is log-normal per step, with hiccups, slow drift of the whole host and bursts of other work
that hit one rank for seconds, as measured with four ranks on two cores. Seeds decide everything.
"""

from __future__ import annotations

import bisect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, Words, encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look
from tests.analysis.program import Issued, Machine, Op, Rank
from tests.analysis.records import START_NS, grouped

MS = 1_000_000
Item = tuple[int, schema.AnyRecord | tuple[schema.Chunk, dict[str, Column]]]  # arrival ns, what


@dataclass(frozen=True, slots=True)
class Noise:
    """How uneven the machine is."""

    sigma: float = 0.15  # of the log of each step's compute
    hiccup_share: float = 0.01  # of steps that take `hiccup_ratio`
    hiccup_ratio: float = 2.5
    drift: float = 0.10  # sigma of the slow change of the whole host
    bursts_per_100_s: float = 3.0  # per rank; each a few seconds
    burst_seconds: float = 6.0  # longest
    burst_ratio: float = 1.6


CALM = Noise(0.02, 0.005, 2.0, 0.01, 0.0)
HEAVY = Noise()


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one rank, from `start` for `steps` steps."""

    kind: Literal["slow_compute", "slow_data", "hang", "crash"]
    rank: int
    start: int
    size: float = 0.0  # share of the rank's usual compute, added
    steps: int = 1 << 30
    microbatch: int = -1  # a hang inside this forward; -1: before the first

    def covers(self, rank: int, step: int) -> bool:
        """Return whether it is on."""
        return self.rank == rank and self.start <= step < self.start + self.steps


@dataclass(frozen=True, slots=True)
class Job:
    """A training run to simulate."""

    num_ranks: int = 4
    num_stages: int = 1  # > 1: pipelines of so many stages
    steps: int = 300
    step_ms: float = 100.0
    num_microbatches: int = 4
    num_hosts: int = 1
    noise: Noise = HEAVY
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    clock_error_ms: float = 0.0
    first_step: int = 1
    checkpoint_every: int = 0

    @property
    def num_replicas(self) -> int:
        """Return how many ranks share a stage."""
        return self.num_ranks // self.num_stages

    def stage(self, rank: int) -> int:
        """Return the stage of a rank; replicas of a pipeline are consecutive ranks."""
        return rank % self.num_stages

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank * self.num_hosts // self.num_ranks

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return the process groups: the world, and one per stage where there are replicas."""
        found = {"world": tuple(range(self.num_ranks))}
        for stage in range(self.num_stages if self.num_stages > 1 else 0):
            members = tuple(range(stage, self.num_ranks, self.num_stages))
            if len(members) > 1:
                found[f"dp-{stage}"] = members
        return found


class Load:
    """How much longer work takes than usual, by rank and time."""

    def __init__(self, job: Job) -> None:
        self._noise = job.noise
        self._random = random.Random(job.seed)
        horizon_ms = 3.0 * job.steps * job.step_ms + 60_000
        self._drift = self._walk(horizon_ms)
        self._bursts = {rank: self._bursts_of(horizon_ms) for rank in range(job.num_ranks)}

    def _walk(self, horizon_ms: float) -> list[float]:
        value, found = 0.0, []
        for _ in range(int(horizon_ms / 1000) + 2):
            value = 0.9 * value + self._random.gauss(0, self._noise.drift * 0.44)
            found.append(float(np.exp(value)))
        return found

    def _bursts_of(self, horizon_ms: float) -> list[tuple[float, float]]:
        count = int(self._noise.bursts_per_100_s * horizon_ms / 1e5)
        begins = (self._random.uniform(0, horizon_ms) for _ in range(count))
        longest = self._noise.burst_seconds * 1e3
        return [(begin, begin + self._random.uniform(0.5e3, longest)) for begin in begins]

    def ratio(self, rank: int, now_ms: float) -> float:
        """Return the factor for one step."""
        noise = self._noise
        ratio = self._drift[min(int(now_ms / 1000), len(self._drift) - 1)]
        ratio *= float(np.exp(self._random.gauss(0, noise.sigma)))
        if self._random.random() < noise.hiccup_share:
            ratio *= noise.hiccup_ratio
        if any(begin <= now_ms < end for begin, end in self._bursts[rank]):
            ratio *= noise.burst_ratio
        return ratio


def programs(job: Job) -> Callable[[int, int, float], list[Op]]:
    """Return what each rank does in each step."""
    load = Load(job)
    own_ms = 0.8 * job.step_ms

    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        ratio = load.ratio(rank, now_ms) * (5.0 if step == 1 else 1.0)
        on = [fault for fault in job.faults if fault.covers(rank, step)]
        slow = {f.kind: f.size * own_ms for f in on}
        ops = [Op("compute", "data", 0.3 + slow.get("slow_data", 0.0))]
        stops = [f for f in on if f.kind in ("hang", "crash")]
        if stops and stops[0].microbatch < 0:
            return [*ops, Op("stop" if stops[0].kind == "hang" else "raise", "forward")]
        forward = own_ms * ratio / 3 + slow.get("slow_compute", 0.0)
        backward = own_ms * ratio * 2 / 3
        hang_at = stops[0].microbatch if stops else -1
        if job.num_stages > 1:
            ops += _pipeline(job, rank, forward, backward, hang_at)
        else:
            ops += _data_parallel(forward, backward)
        if job.checkpoint_every and step % job.checkpoint_every == 0 and rank == 0:
            ops.append(Op("compute", "checkpoint", 15 * job.step_ms))
        return [*ops, Op("compute", "optimizer", 0.05 * own_ms)]

    return build


def _data_parallel(forward: float, backward: float) -> list[Op]:
    return [
        Op("compute", "forward", forward),
        Op("compute", "backward", backward / 2),
        Op("issue", "backward", group="world"),
        Op("compute", "backward", backward / 2),
        Op("issue", "backward", group="world"),
        Op("join", "backward"),
    ]


def _pipeline(job: Job, rank: int, forward: float, backward: float, hang_at: int) -> list[Op]:
    """Return GPipe: all forwards, then all backwards, then the gradients of the replicas."""
    stage, count = job.stage(rank), job.num_microbatches
    is_first, is_last = stage == 0, stage == job.num_stages - 1
    ops: list[Op] = []
    for microbatch in range(count):
        if not is_first:
            ops.append(Op("recv", group="world", peer=rank - 1))
        if microbatch == hang_at:
            ops.append(Op("stop", "forward"))
        ops.append(Op("compute", "forward", forward / count))
        if not is_last:
            ops.append(Op("send", group="world", peer=rank + 1))
    ops.append(Op("wait"))
    for _ in range(count):
        if not is_last:
            ops.append(Op("recv", group="world", peer=rank + 1))
        ops.append(Op("compute", "backward", backward / count))
        if not is_first:
            ops.append(Op("send", group="world", peer=rank - 1))
    ops.append(Op("wait"))
    if job.num_replicas > 1:
        ops += [Op("issue", group=f"dp-{stage}"), Op("join")]
    return [*ops, Op("issue", group="world"), Op("join")]


@dataclass(slots=True)
class Recording:
    """What the agents of a job would send, and what happened."""

    job: Job
    machine: Machine
    extra: list[Item] = field(default_factory=list)  # arrival, what: errors, ends

    @property
    def last_ms(self) -> float:
        """Return the time of the last thing that any rank did."""
        return max(rank.moves[-1][0] for rank in self.machine.ranks if rank.moves)

    def clock_ns(self, rank: int, now_ms: float) -> int:
        """Return what the clock of a rank's host shows."""
        return START_NS + int((now_ms + self._clock_error_ms(rank)) * MS)

    def _clocks_ns(self, rank: int, times_ms: np.ndarray) -> np.ndarray:
        return START_NS + ((times_ms + self._clock_error_ms(rank)) * MS).astype(np.int64)

    def _clock_error_ms(self, rank: int) -> float:
        return ((self.job.host(rank) * 7919) % 5 - 2) / 2 * self.job.clock_error_ms

    def registrations(self) -> list[Item]:
        """Return what ranks say of themselves when they start."""
        job, items = self.job, []
        for rank in range(job.num_ranks):
            now = self.clock_ns(rank, 0.0)
            who = {"attempt": 0, "rank": rank, "time_ns": now}
            items.append((START_NS, schema.RankRegistered(
                **who, world_size=job.num_ranks, local_rank=rank,
                local_world_size=job.num_ranks // job.num_hosts, node_rank=job.host(rank),
                host=f"node-{job.host(rank)}", pid=1000 + rank, backend="gloo",
                stage=job.stage(rank) if job.num_stages > 1 else -1,
                num_stages=job.num_stages if job.num_stages > 1 else 0,
            )))  # fmt: skip
            items += [
                (START_NS, grouped(**who, ranks=ranks, group=name, backend=""))
                for name, ranks in job.groups().items()
                if rank in ranks
            ]
        return items

    def steps(self, per_chunk: int = 10) -> list[Item]:
        """Return the chunks of steps."""
        items: list[Item] = []
        for rank in self.machine.ranks:
            done = [log for log in rank.log if log.ended_ms == log.ended_ms]
            num_issued = Counter(one.step for one in rank.issued)
            for begin in range(0, len(done), per_chunk):
                part = done[begin : begin + per_chunk]
                rows = [self._step_row(rank, log, num_issued) for log in part]
                columns: dict[str, Column] = {
                    name: np.array([row[name] for row in rows], np.int64)
                    for name in schema.STEP_COLUMNS
                }
                items.append(
                    (START_NS + int(part[-1].ended_ms * MS), _chunk("steps", rank.number, columns))
                )
        return items

    def _step_row(self, rank: Rank, log: object, num_issued: Mapping[int, int]) -> dict[str, int]:
        row = dict.fromkeys(schema.STEP_COLUMNS, 0)
        spent, blocked = log.spent, log.blocked  # type: ignore[attr-defined]
        for phase, took in spent.items():
            row[f"{phase}_ns"] = int(took * MS)
        for phase, took in blocked.items():
            row[f"{phase}_blocked_ns"] = int(took * MS * 0.99)  # hooks see a little less
        step, started = log.step, log.started_ms  # type: ignore[attr-defined]
        total = sum(spent.values())
        row |= {
            "step": step + self.job.first_step - 1,
            "started_ns": self.clock_ns(rank.number, started),
            "duration_ns": int(total * MS),
            "num_collectives": num_issued.get(step, 0),
            "cpu_ns": int(0.4 * self.job.step_ms * MS),
        }
        if step == 1:
            row["flags"] |= schema.STEP_FIRST
        if "checkpoint" in spent:
            row["flags"] |= schema.STEP_CHECKPOINT
        return row

    def collectives(self, per_chunk: int = 100) -> list[Item]:
        """Return the chunks of collectives that ended."""
        items: list[Item] = []
        for rank in self.machine.ranks:
            done = [one for one in rank.issued if one.ended_ms < float("inf")]
            for begin in range(0, len(done), per_chunk):
                part = done[begin : begin + per_chunk]
                ended = max(one.ended_ms for one in part)
                items.append(
                    (START_NS + int(ended * MS), _chunk("collectives", rank.number,
                                                        self._rows(rank, part)))
                )  # fmt: skip
        return items

    def _rows(self, rank: Rank, part: Sequence[Issued]) -> dict[str, Column]:
        nothing = np.zeros(len(part), np.int64)
        columns: dict[str, Column] = dict.fromkeys(schema.COLLECTIVE_COLUMNS, nothing)
        issued_ms = np.array([one.issued_ms for one in part])
        ended_ms = np.array([one.ended_ms for one in part])
        peers = np.array([one.peer for one in part], np.int64)
        size = np.full(len(part), 1 << 20)
        no_words = Words(nothing, [""])
        columns |= {
            "arrived_ns": self._clocks_ns(rank.number, issued_ms),
            "duration_ns": ((ended_ms - issued_ms) * MS).astype(np.int64),
            "step": np.array([one.step for one in part], np.int64),
            "state": np.full(len(part), schema.ENDED),
            "size_bytes": size, "input_bytes": size, "output_bytes": size,
            "sequence": np.array([one.sequence for one in part], np.int64),
            "peer_rank": peers,
            "flags": np.where(peers >= 0, schema.FLAG_P2P, 0),
            "group": Words.of([one.group for one in part]),
            "operation": Words.of([one.operation for one in part]),
            "dtype": Words(nothing, ["float32"]),
            "reduce_op": no_words, "call_site": no_words, "issued_by": no_words,
            "ended_by": no_words,
        }  # fmt: skip
        return columns

    def state(self, rank: Rank, now_ms: float) -> schema.RankState:
        """Return where a rank is at a moment."""
        num_moves = bisect.bisect_right(rank.moves, now_ms, key=lambda move: move[0])
        moved_ms, phase, step = rank.moves[num_moves - 1] if num_moves else (0.0, "other", 1)
        num_issued = bisect.bisect_right(rank.issued, now_ms, key=lambda one: one.issued_ms)
        issued = rank.issued[:num_issued]
        names = [name for name, ranks in self.job.groups().items() if rank.number in ranks]
        return schema.RankState(
            attempt=0, rank=rank.number, time_ns=self.clock_ns(rank.number, now_ms),
            step=step + self.job.first_step - 1, phase=phase,
            phase_since_ns=self.clock_ns(rank.number, moved_ms),
            heartbeat_ns=self.clock_ns(rank.number, moved_ms),
            groups=[self._group(rank, name, issued, now_ms) for name in names],
        )  # fmt: skip

    def _group(
        self, rank: Rank, name: str, issued: Iterable[Issued], now_ms: float
    ) -> schema.GroupState:
        mine = [one for one in issued if one.group == name]
        collectives = [one for one in mine if one.peer < 0]
        last = collectives[-1] if collectives else None
        exchanges = [one for one in mine if one.peer >= 0 and one.ended_ms > now_ms]
        oldest = min(exchanges, key=lambda one: one.issued_ms, default=None)
        return schema.GroupState(
            group=name,
            issued=len(collectives),
            ended=sum(collective.ended_ms <= now_ms for collective in collectives),
            operation=last.operation if last else "",
            size_bytes=1 << 20 if last else 0,
            issued_ns=self.clock_ns(rank.number, last.issued_ms) if last else 0,
            p2p_operation=oldest.operation if oldest else "",
            p2p_peer=oldest.peer if oldest else -1,
            p2p_issued_ns=self.clock_ns(rank.number, oldest.issued_ms) if oldest else 0,
        )

    def states(self, now_ms: float) -> list[Item]:
        """Return where all ranks are at a moment."""
        at = START_NS + int(now_ms * MS)
        return [(at, self.state(rank, now_ms)) for rank in self.machine.ranks]

    def items(self) -> list[Item]:
        """Return everything but states, in order of arrival."""
        items = [*self.registrations(), *self.steps(), *self.collectives(), *self.extra]
        return sorted(items, key=lambda item: item[0])


def _chunk(
    kind: schema.ChunkKind, rank: int, columns: dict[str, Column]
) -> tuple[schema.Chunk, dict[str, Column]]:
    times = np.asarray(columns["started_ns" if kind == "steps" else "arrived_ns"])
    lo, hi = int(times.min()), int(times.max())
    is_read = kind == "collectives"  # of steps the columns are all that is
    data = encode_chunk(columns) if is_read else f"{kind} {rank} {lo}".encode()
    count = len(times)
    chunk = schema.Chunk(
        kind=kind, attempt=0, rank=rank, host="", count=count, time_lo_ns=lo, time_hi_ns=hi,
        data=data,
    )  # fmt: skip
    return chunk, columns


def record(job: Job) -> Recording:
    """Run a job."""
    machine = Machine(job.num_ranks, job.groups(), programs(job), job.steps)
    machine.run()
    return Recording(job, machine)


def apply(state: RunState, items: Iterable[Item]) -> None:
    """Give items to an analysis in the order in which they stand."""
    for _, what in items:
        if isinstance(what, tuple):
            state.apply_chunk(*what)
        else:
            state.apply_record(what)


def analyse(recording: Recording, at_ms: float | None = None) -> Look:
    """Give an analysis everything up to a moment, and look."""
    at_ms = recording.last_ms + 1.0 if at_ms is None else at_ms
    now_ns = START_NS + int(at_ms * MS)
    state = RunState("sim")
    apply(state, [item for item in recording.items() if item[0] <= now_ns])
    apply(state, recording.states(at_ms))
    return state.look(now_ns)


def spoil(items: Sequence[Item], seed: int, lost: float = 0.01) -> list[Item]:
    """Return the items shuffled, some doubled, and some steps lost."""
    chance = random.Random(seed)
    kept = [item for item in items if not isinstance(item[1], tuple) or chance.random() >= lost]
    kept += [item for item in kept if chance.random() < 0.1]
    chance.shuffle(kept)
    return kept


def without_fault(job: Job) -> Job:
    """Return the same job, healthy."""
    return replace(job, faults=())


def wide(own_ms: np.ndarray, per_chunk: int = 50) -> list[Item]:
    """Return a data-parallel job of many ranks from its self time, ranks x steps.

    The program of a thousand ranks would take minutes; here every step lasts as long as its
    slowest rank, and the others are blocked in backward for the rest.
    """
    num_ranks, num_steps = own_ms.shape
    duration = own_ms.max(0) + 2.0
    started = START_NS + np.concatenate([[0], np.cumsum(duration * MS)[:-1]]).astype(np.int64)
    items: list[Item] = []
    for rank in range(num_ranks):
        who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
        items.append((START_NS, schema.RankRegistered(
            **who, world_size=num_ranks, local_rank=rank % 8, local_world_size=8,
            node_rank=rank // 8, host=f"node-{rank // 8}", pid=rank,
        )))  # fmt: skip
        for begin in range(0, num_steps, per_chunk):
            part = slice(begin, min(begin + per_chunk, num_steps))
            own, whole = own_ms[rank, part], duration[part]
            columns: dict[str, Column] = {
                name: np.zeros(len(own), np.int64) for name in schema.STEP_COLUMNS
            }
            columns["step"] = np.arange(part.start, part.stop) + 1
            columns["started_ns"] = started[part]
            columns["duration_ns"] = (whole * MS).astype(np.int64)
            columns["forward_ns"] = (own / 3 * MS).astype(np.int64)
            columns["backward_ns"] = ((whole - own / 3) * MS).astype(np.int64)
            columns["backward_blocked_ns"] = ((whole - own) * MS).astype(np.int64)
            items.append((int(started[part.stop - 1]), _chunk("steps", rank, columns)))
    return sorted(items, key=lambda item: item[0])


def say(text: str) -> None:
    """Show a measured result with `pytest -s`."""
    sys.stdout.write(text + "\n")
