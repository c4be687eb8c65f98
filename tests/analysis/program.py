"""Runs the programs of many ranks against each other in simulated time.

A program is a list of operations per step: compute, collectives (async, joined later),
sends and receives. Ranks block as real ones do, so who waits for whom, and for how long,
comes out of the run and is not written down by hand. Times are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["compute", "issue", "join", "send", "recv", "wait", "stop", "raise"]


class Op(NamedTuple):  # made and read more quickly than a dataclass, some million times
    """One operation; `phase` is the phase of the step in which it runs."""

    kind: Kind
    phase: str = "other"
    ms: float = 0.0  # of a compute
    group: str = ""
    peer: int = -1


@dataclass(slots=True, eq=False)
class Issued:
    """A collective or an exchange of one rank."""

    group: str
    operation: str
    sequence: int
    issued_ms: float
    step: int
    peer: int = -1
    ended_ms: float = math.inf  # when the rank itself knows of the end
    done_ms: float = math.inf  # when it is complete


@dataclass(slots=True)
class StepLog:
    """What one step of one rank took."""

    step: int
    started_ms: float
    ended_ms: float = math.nan
    spent: dict[str, float] = field(default_factory=dict)  # with what it was blocked
    blocked: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rank:
    """A rank while it runs, and its history."""

    number: int
    now_ms: float = 0.0
    step: int = 1
    program: Sequence[Op] = ()
    at: int = 0
    log: list[StepLog] = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)
    moves: list[tuple[float, str, int]] = field(default_factory=list)  # time, phase, step
    open: list[Issued] = field(default_factory=list)
    receives: Issued | None = None
    counts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    stopped_ms: float = math.inf
    raised_ms: float = math.inf
    is_over: bool = False


Build: TypeAlias = Callable[[int, int, float], Sequence[Op]]  # rank, step, time -> program
_TRANSFER_MS = 2.0


class Machine:
    """Runs `build(rank, step, time)` for all ranks up to `steps` steps or until nothing moves."""

    def __init__(
        self, num_ranks: int, groups: dict[str, tuple[int, ...]], build: Build, steps: int
    ) -> None:
        self.groups, self.build, self.steps = groups, build, steps
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self._arrivals: dict[tuple[str, int], dict[int, Issued]] = {}
        self._sends: dict[tuple[int, int, int], Issued] = {}
        self._takes: dict[tuple[int, int, int], float] = {}

    def run(self) -> None:
        """Run until all programs are over or all ranks that remain are blocked."""
        for rank in self.ranks:
            self._begin_step(rank)
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= self._advance(rank)

    def _begin_step(self, rank: Rank) -> None:
        rank.program = self.build(rank.number, rank.step, rank.now_ms)
        rank.at = 0
        rank.log.append(StepLog(rank.step, rank.now_ms))

    def _advance(self, rank: Rank) -> bool:
        """Run a rank until it must wait for another one; return whether it did anything."""
        moved = False
        while not rank.is_over:
            if rank.at == len(rank.program):
                rank.log[-1].ended_ms = rank.now_ms
                rank.is_over = rank.step == self.steps
                if not rank.is_over:
                    rank.step += 1
                    self._begin_step(rank)
            else:
                op = rank.program[rank.at]
                if not _DO[op.kind](self, rank, op):
                    break
                rank.at += 1
            moved = True
        return moved

    def _move(self, rank: Rank, phase: str) -> None:
        rank.moves.append((rank.now_ms, phase, rank.step))

    def _spend(self, rank: Rank, op: Op, until_ms: float, *, blocked: bool) -> None:
        took = max(0.0, until_ms - rank.now_ms)
        log = rank.log[-1]
        log.spent[op.phase] = log.spent.get(op.phase, 0.0) + took
        if blocked:
            log.blocked[op.phase] = log.blocked.get(op.phase, 0.0) + took
        rank.now_ms += took

    def _compute(self, rank: Rank, op: Op) -> bool:
        phase, moves, spent = op.phase, rank.moves, rank.log[-1].spent
        moves.append((rank.now_ms, phase, rank.step))
        took = max(0.0, rank.now_ms + op.ms - rank.now_ms)
        spent[phase] = spent.get(phase, 0.0) + took
        rank.now_ms += took
        moves.append((rank.now_ms, "other", rank.step))
        return True

    def _record(self, rank: Rank, op: Op, operation: str) -> Issued:
        key = (op.group, operation if op.peer >= 0 else "", op.peer)
        rank.counts[key] = sequence = rank.counts.get(key, 0) + 1
        issued = Issued(op.group, operation, sequence, rank.now_ms, rank.step, op.peer)
        rank.issued.append(issued)
        rank.moves.append((rank.now_ms, op.phase, rank.step))
        return issued

    def _issue(self, rank: Rank, op: Op) -> bool:
        issued = self._record(rank, op, "all_reduce")
        rank.open.append(issued)
        arrived = self._arrivals.setdefault((op.group, issued.sequence), {})
        arrived[rank.number] = issued
        if len(arrived) == len(self.groups[op.group]):
            done = max(one.issued_ms for one in arrived.values()) + _TRANSFER_MS
            for one in arrived.values():
                one.done_ms = one.ended_ms = done
        return True

    def _join(self, rank: Rank, op: Op) -> bool:
        mine = [one for one in rank.open if one.peer < 0]
        if any(math.isinf(one.done_ms) for one in mine):
            return False
        latest = max((one.done_ms for one in mine), default=rank.now_ms)
        rank.open = [one for one in rank.open if one.peer >= 0]
        self._spend(rank, op, latest, blocked=True)
        self._move(rank, op.phase)
        return True

    def _send(self, rank: Rank, op: Op) -> bool:
        issued = self._record(rank, op, "send")
        rank.open.append(issued)
        self._sends[rank.number, op.peer, issued.sequence] = issued
        return True

    def _recv(self, rank: Rank, op: Op) -> bool:
        issued = rank.receives or self._record(rank, op, "recv")
        rank.receives = issued
        sent = self._sends.get((op.peer, rank.number, issued.sequence))
        if sent is None:
            return False
        until = max(rank.now_ms, sent.issued_ms + _TRANSFER_MS)
        issued.done_ms = issued.ended_ms = until
        self._takes[op.peer, rank.number, issued.sequence] = until
        rank.receives = None
        self._spend(rank, op, until, blocked=True)
        self._move(rank, op.phase)
        return True

    def _wait(self, rank: Rank, op: Op) -> bool:
        """Wait for all sends: each is over when its taker has it."""
        sends = [one for one in rank.open if one.peer >= 0]
        taken = [self._takes.get((rank.number, send.peer, send.sequence)) for send in sends]
        if None in taken:
            return False
        until = max([rank.now_ms, *(time for time in taken if time is not None)])
        self._spend(rank, op, until, blocked=True)
        rank.open = [one for one in rank.open if one.peer < 0]
        for send in sends:
            send.done_ms = send.ended_ms = rank.now_ms
        self._move(rank, op.phase)
        return True

    def _stop(self, rank: Rank, op: Op) -> bool:
        if math.isinf(rank.stopped_ms):
            self._move(rank, op.phase)
            rank.stopped_ms = rank.now_ms
        return False

    def _raise(self, rank: Rank, op: Op) -> bool:
        rank.raised_ms = min(rank.raised_ms, rank.now_ms)
        return False


_DO: dict[str, Callable[[Machine, Rank, Op], bool]] = {
    "compute": Machine._compute,
    "issue": Machine._issue,
    "join": Machine._join,
    "send": Machine._send,
    "recv": Machine._recv,
    "wait": Machine._wait,
    "stop": Machine._stop,
    "raise": Machine._raise,
}
