"""Reassignment: a worker that is behind leaves some of its microbatches to faster ones.

    step begins   every worker offers its microbatches to the first server
    worker 0      claims own 0, 1, 2, 3   then worker 1's 3, 2   then nothing is left: push
    worker 1      claims own 0 ........, 1 ..........            then nothing is left: push

As in FlexRR (Harlap et al. 2016) the work of a step moves while the step runs, and moves back by
itself as soon as the worker is fast again. A microbatch is claimed just before it is trained: own
ones from the front, then, from the back, those of the worker that has most of them left. The pool
hands each out once, so each is trained exactly once, and since every gradient is divided by the
same number the mean over all workers is that of the step without reassignment.

FlexRR's workers report progress to each other; here the claims are the reports, and the first
server is where they meet. It costs a message and a reply for each microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope_trainer.data import Sample
from rankscope_trainer.strategies.parameter_server.wire import (
    REPLY_NUMBERS,
    Kind,
    Tag,
    Wire,
    header,
)

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

NOTHING_LEFT = -1  # in the place of a worker


class SharedWork:
    """A worker's side."""

    def __init__(self, wire: Wire, coordinator: int) -> None:
        """Name the server that keeps the pool."""
        self._wire = wire
        self._coordinator = coordinator
        self._rank = dist.get_rank()
        self.num_helped = 0  # microbatches of others in this step

    def microbatches(self, batch: Sample, number: int, step: int) -> Iterator[Sample]:
        """Offer the batch, then yield one microbatch after the other, of any worker."""
        self.num_helped = 0
        device = batch[0].device
        # A byte needs no more room than a byte. Microbatches, inputs and targets, B, T:
        offered = torch.stack([torch.stack(half.chunk(number)) for half in batch], dim=1)
        offered = offered.to("cpu", torch.uint8).contiguous()
        self._send_header(Kind.OFFER, step)
        self._wire.send(offered, self._coordinator, Tag.OFFER)
        while True:
            self._send_header(Kind.CLAIM, step)
            reply = torch.empty(REPLY_NUMBERS, dtype=torch.int64)
            owner, index = self._wire.receive(reply, self._coordinator, Tag.CLAIMED).tolist()
            if owner == NOTHING_LEFT:
                return
            if owner == self._rank:
                microbatch = offered[index]
            else:
                self.num_helped += 1
                microbatch = torch.empty_like(offered[0])
                self._wire.receive(microbatch, self._coordinator, Tag.MICROBATCH)
            bytes_BT, next_BT = microbatch.to(device, torch.int64)
            yield bytes_BT, next_BT

    def _send_header(self, kind: Kind, step: int) -> None:
        self._wire.send(header(kind, step, 0), self._coordinator, Tag.HEADER)


class WorkPool:
    """The first server's side: the microbatches of the step that no worker claimed yet."""

    def __init__(self, wire: Wire, settings: Settings, workers: Sequence[int]) -> None:
        """Begin empty."""
        self._wire = wire
        self._workers = workers
        number = settings.microbatches_for(len(workers))
        self._shape = (number, 2, settings.batch_size, settings.context)
        self._offered: dict[int, Tensor] = {}
        self._left: dict[int, deque[int]] = {}  # by the worker that offered them
        self._waiting: list[int] = []
        self._num_done = 0  # workers that know that nothing is left
        self.num_moved = 0  # since the start

    def serve(self, kind: Kind, worker: int) -> None:
        """Take an offer or a claim, and answer those claims that can be answered."""
        if kind is Kind.OFFER:
            offered = torch.empty(self._shape, dtype=torch.uint8)
            self._offered[worker] = self._wire.receive(offered, worker, Tag.OFFER)
            self._left[worker] = deque(range(len(offered)))
        else:
            self._waiting.append(worker)
        for waiting in list(self._waiting):
            self._answer(waiting)
        if self._num_done == len(self._workers):
            self._offered.clear()  # every worker begins the next step with an offer
            self._left.clear()
            self._num_done = 0

    def _answer(self, worker: int) -> None:
        """Hand out a microbatch; with none left, wait until every worker has offered its own."""
        owner, index = self._choose(worker)
        if owner == NOTHING_LEFT and len(self._left) < len(self._workers):
            return
        self._waiting.remove(worker)
        self._wire.send(torch.tensor([owner, index]), worker, Tag.CLAIMED)
        self._num_done += owner == NOTHING_LEFT
        if owner not in (worker, NOTHING_LEFT):
            self.num_moved += 1
            self._wire.send(self._offered[owner][index], worker, Tag.MICROBATCH)

    def _choose(self, worker: int) -> tuple[int, int]:
        if self._left[worker]:
            return worker, self._left[worker].popleft()
        behind = max(self._left, key=lambda rank: len(self._left[rank]))
        if not self._left[behind]:
            return NOTHING_LEFT, 0
        return behind, self._left[behind].pop()
