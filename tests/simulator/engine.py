"""Runs a job for all ranks at once, one numpy operation per call of the program.

An array holds one time per rank. Infinity means never: who waits for somebody that never comes
never goes on, so a hang spreads through nested groups by taking maxima, and nothing of what it
leaves behind is written down by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tests.simulator.job import SLOW_COMPUTE, SLOW_DATA, STOPS, Fault, Job
from tests.simulator.network import slowed, slowed_pairs

Array = np.ndarray
Kind = Literal["world", "dp", "tp", "pp"]
_AXES = {"dp": 1, "tp": 2}
_WRONG = {"shape", "dtype", "operation", "reduce_op"}


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective looks like to the agent."""

    operation: str
    size_bytes: int
    dtype: str = "float32"
    reduce_op: str = "sum"
    site: str = ""


@dataclass(slots=True)
class Row:
    """One call of the program for all ranks, by (pipeline, data, tensor). NaN: takes no part."""

    kind: Kind
    call: Call
    phase: str
    issued: Array
    ended: Array
    peer: Array | None = None  # of an exchange
    odd: dict[int, Call] = field(default_factory=dict)  # ranks that call something else


@dataclass(slots=True)
class Step:
    """One step of all ranks: its calls, and how long each phase took and was blocked."""

    number: int
    started: Array
    ended: Array
    rows: list[Row]
    spent: dict[str, Array]
    blocked: dict[str, Array]
    moved: Array  # last time that a rank did anything
    phase: Array  # where it is if it never came out, index of PHASES
    factor: Array


PHASES = ("data", "forward", "backward", "optimizer", "checkpoint")


class Engine:
    """Yields the steps of a job one after the other, until the last or until nothing moves."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._chance = np.random.default_rng(job.seed)
        self._shape = (job.pipeline, job.data, job.tensor)
        self._now = np.zeros(self._shape)
        self._moved = np.zeros(self._shape)
        self._phase = np.zeros(self._shape, np.int64)
        self.hung: set[int] = set()  # ranks that came to where they hang

    def steps(self) -> Iterator[Step]:
        """Run the job."""
        for number in range(1, self.job.steps + 1):
            step = self._step(number)
            yield step
            if np.isinf(self._now).all():
                return

    # --- one step ----------------------------------------------------------------------------

    def _step(self, number: int) -> Step:
        job = self.job
        on = [fault for fault in job.faults if fault.covers(number)]
        factor = self._factors(number)
        slow = np.ones(self._shape)
        data = np.full(self._shape, job.data_ms)
        for fault in on:
            if fault.kind in SLOW_COMPUTE:
                slow[job.place(fault.rank)] += fault.size
            elif fault.kind in SLOW_DATA:
                data[job.place(fault.rank)] += fault.size * 3 * job.forward_ms
            elif fault.kind == "slow_loader":
                data += fault.size * 3 * job.forward_ms
        self._rows: list[Row] = []
        self._spent = {name: np.zeros(self._shape) for name in PHASES}
        self._blocked = {name: np.zeros(self._shape) for name in PHASES}
        self._on, self._number = on, number
        started = self._now.copy()
        self._stop("data", 0)
        self._work("data", data * factor)
        forward = job.forward_ms * factor * slow / job.microbatches
        for microbatch in range(job.microbatches):
            self._sweep("forward", microbatch, forward)
        for microbatch in range(job.microbatches):
            last = microbatch == job.microbatches - 1
            self._sweep("backward", microbatch, 2 * forward, is_last=last)
        self._stop("norm", 0)
        if len(job.group_names(0)) > 2 or job.data == 1:
            self._collective("world", Call("all_reduce", 4, site="train.py:61 clip"), "optimizer")
        self._work("optimizer", job.optimizer_ms * factor)
        if job.save_every and number % job.save_every == 0:
            self._save(factor)
        return Step(number, started, self._now.copy(), self._rows, self._spent, self._blocked,
                    self._moved.copy(), self._phase.copy(), factor)  # fmt: skip

    def _save(self, factor: Array) -> None:
        took = self.job.save_ms * factor
        for fault in self._on:
            if fault.kind == "slow_save":
                took *= 1 + fault.size
        self._work("checkpoint", took)

    def _factors(self, number: int) -> Array:
        noise = self.job.noise
        factor = np.exp(self._chance.normal(0, noise.sigma, self._shape))
        factor[self._chance.random(self._shape) < noise.hiccup_share] *= noise.hiccup_ratio
        return factor * (5.0 if number == 1 else 1.0)

    def _sweep(self, phase: str, microbatch: int, took: Array, is_last: bool = False) -> None:
        """Send one microbatch through the stages, forward or backward."""
        job = self.job
        order = list(range(job.pipeline))
        order = order if phase == "forward" else order[::-1]
        sent: Array | None = None
        self._stop(phase, microbatch)
        for place, stage in enumerate(order):
            here = np.zeros(self._shape, bool)
            here[stage] = True
            if place:
                assert sent is not None
                self._receive(here, order[place - 1], stage, sent, phase)
            if is_last and job.pipeline == 1 and job.data > 1:
                self._backward_with_buckets(took)
            else:
                self._work(phase, took, here)
                if job.tensor > 1:
                    site = f"layers.py:{30 if phase == 'forward' else 44} {phase}"
                    self._collective("tp", Call("all_reduce", 1 << 22, "bfloat16", site=site),
                                     phase, here)  # fmt: skip
            if place < job.pipeline - 1:
                sent = self._send(here, stage, order[place + 1], phase)
        if is_last and (job.pipeline > 1) and job.data > 1:
            self._gradients("backward", None)

    def _backward_with_buckets(self, took: Array) -> None:
        """Overlap the all_reduces of the gradients with the rest of backward."""
        self._gradients("backward", took / self.job.buckets)

    # --- the parts of a program ------------------------------------------------------------

    def _at(self, phase: str, where: Array) -> None:
        alive = where & np.isfinite(self._now)
        self._moved[alive] = self._now[alive]
        self._phase[alive] = PHASES.index(phase)

    def _stop(self, point: str, microbatch: int) -> None:
        """Stop the ranks that hang here."""
        for fault in self._on:
            if fault.kind not in STOPS or fault.point != point or fault.start != self._number:
                continue
            if point in ("forward", "backward") and fault.microbatch != microbatch:
                continue
            place = self.job.place(fault.rank)
            if np.isfinite(self._now[place]):
                self.hung.add(fault.rank)
                self._moved[place] = self._now[place]
                phase = {"norm": "optimizer", "gradients": "backward"}.get(point, point)
                self._phase[place] = PHASES.index(phase)
            self._now[place] = np.inf

    def _work(self, phase: str, took: Array, where: Array | None = None) -> None:
        here = np.ones(self._shape, bool) if where is None else where
        self._at(phase, here)
        self._spent[phase][here] += took[here]
        self._now[here] += took[here]
        self._at(phase, here)

    def _wait(self, phase: str, until: Array, here: Array) -> None:
        since = self._now[here]
        stuck = np.isinf(since)  # never minus never
        waited = np.where(stuck, np.inf, np.maximum(until[here] - np.where(stuck, 0, since), 0))
        self._spent[phase][here] += waited
        self._blocked[phase][here] += waited
        self._now[here] = np.maximum(self._now[here], until[here])
        self._at(phase, here)

    def _collective(self, kind: Kind, call: Call, phase: str, where: Array | None = None) -> None:
        here = np.ones(self._shape, bool) if where is None else where
        self._at(phase, here)
        issued = np.where(here, self._now, np.nan)
        ended = np.where(here, self._join(kind, np.where(here, issued, 0.0)), np.nan)
        self._rows.append(Row(kind, call, phase, issued, ended))
        self._wait(phase, ended, here)

    def _join(self, kind: Kind, issued: Array) -> Array:
        """Return when a collective ends for each rank: all have come, and the transfer."""
        if kind == "world":
            latest = np.broadcast_to(issued.max(), self._shape)
        else:
            latest = np.broadcast_to(issued.max(_AXES[kind], keepdims=True), self._shape)
        return latest + self._transfer(kind)

    def _transfer(self, kind: Kind) -> Array:
        job = self.job
        noise = np.exp(self._chance.normal(0, job.noise.transfer_sigma, self._shape))
        if kind == "world":
            noise[:] = noise.flat[0]
        elif kind in _AXES:
            noise[:] = np.take(noise, [0], axis=_AXES[kind])
        took = job.transfer_ms * noise
        for fault in self._on:
            if fault.kind == "slow_link" and kind in _AXES:
                took *= slowed(job, fault, kind)
        return took

    def _send(self, here: Array, stage: int, to: int, phase: str) -> Array:
        self._at(phase, here)
        issued = np.where(here, self._now, np.nan)
        peer = np.full(self._shape, -1)
        peer[stage] = self.job.grid[to]
        call = Call("send", 1 << 20, "bfloat16", "", f"pipeline.py:{12 + (to > stage)} {phase}")
        self._rows.append(Row("pp", call, phase, issued, np.full(self._shape, np.nan), peer))
        return issued[stage]

    def _receive(self, here: Array, source: int, stage: int, sent: Array, phase: str) -> None:
        """Receive what a stage sent; its send ends when it was taken."""
        self._at(phase, here)
        issued = np.where(here, self._now, np.nan)
        ended = np.full(self._shape, np.nan)
        took = self._transfer("pp")[stage]
        for fault in self._on:
            if fault.kind == "slow_link":
                took *= slowed_pairs(self.job, fault, source, stage)
        ended[stage] = np.maximum(self._now[stage], sent) + took
        peer = np.full(self._shape, -1)
        peer[stage] = self.job.grid[source]
        theirs = self._rows[-1]
        assert theirs.call.operation == "send"
        theirs.ended[source] = ended[stage]
        call = Call("recv", 1 << 20, "bfloat16", "", f"pipeline.py:{22 + (stage > source)} {phase}")
        self._rows.append(Row("pp", call, phase, issued, ended, peer))
        self._wait(phase, ended, here)

    # --- gradients, and calls that are wrong -------------------------------------------------

    def _gradients(self, phase: str, between: Array | None) -> None:
        """Issue the buckets, one after each part of backward if there is one, and join them."""
        job = self.job
        here = np.ones(self._shape, bool)
        self._stop("gradients", 0)
        issued = []
        for _ in range(job.buckets):
            if between is not None:
                self._work(phase, between)
            self._at(phase, here)
            issued.append(self._now.copy())
            self._now += job.issue_ms
        calls = [Call("all_reduce", (1 << 20) * (1 + bucket), "float32", "sum", "train.py:52 step")
                 for bucket in range(job.buckets)]  # fmt: skip
        both = zip(calls, issued, strict=True)
        rows = [Row("dp", call, phase, times, times) for call, times in both]
        for fault in self._on:
            if fault.start == self._number:
                rows = self._spoil(fault, rows)
        until, before = np.zeros(self._shape), np.zeros(self._shape)
        for row in rows:
            row.ended = self._join("dp", np.where(np.isnan(row.issued), np.inf, row.issued))
            if any(call.operation != row.call.operation for call in row.odd.values()):
                row.ended = self._never(row)
            row.ended = before = np.maximum(row.ended, before)  # a stream keeps the order
            came = np.isfinite(row.issued)
            until[came] = np.maximum(until[came], row.ended[came])
        self._rows += rows
        self._wait(phase, until, here)

    def _never(self, row: Row) -> Array:
        """Return the ends of a row whose groups call different operations: none."""
        ended = row.ended.copy()
        for rank in row.odd:
            stage, _, tensor = self.job.place(rank)
            ended[stage, :, tensor] = np.inf
        return ended

    def _spoil(self, fault: Fault, rows: list[Row]) -> list[Row]:
        """Let one rank skip, insert, swap or mismatch a call.

        A row is a number of the group: who skipped one hands in its next calls one number early,
        and in the end the others wait for one more that does not come.
        """
        if fault.kind not in ("skip", "insert", "swap", *_WRONG):
            return rows
        place, rank, at = self.job.place(fault.rank), fault.rank, fault.bucket
        if fault.kind == "swap":
            rows[at].odd[rank], rows[at + 1].odd[rank] = rows[at + 1].call, rows[at].call
        elif fault.kind == "skip":
            for row, after in zip(rows[at:], rows[at + 1 :], strict=False):
                row.odd[rank] = after.call
            rows[-1].issued[place] = np.inf
        elif fault.kind == "insert":
            extra = Row("dp", rows[-1].call, rows[-1].phase, np.full(self._shape, np.inf),
                        np.full(self._shape, np.inf))  # fmt: skip
            extra.issued[place] = rows[-1].issued[place] + self.job.issue_ms
            rows = [*rows, extra]
            for row, before in reversed(list(zip(rows[at + 1 :], rows[at:], strict=False))):
                row.odd[rank] = before.call
            rows[at].odd[rank] = Call("all_reduce", 64, "float32", "max", "debug.py:7 check")
        else:
            rows[at].odd[rank] = wrong_call(fault.kind, rows[at].call)
        return rows


def wrong_call(kind: str, call: Call) -> Call:
    """Return a call with one thing wrong."""
    if kind == "shape":
        return replace(call, size_bytes=call.size_bytes + 8)
    if kind == "dtype":
        return replace(call, dtype="int32")
    if kind == "operation":
        return replace(call, operation="broadcast", reduce_op="")
    return replace(call, reduce_op="max")
