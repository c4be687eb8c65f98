"""What workers and servers send each other: plain send and recv, one exchange in each step.

    worker                                          server
    header (kind, step, version, when) -----------> from whichever worker comes first
    its part of the gradient ---------------------> one of it was read before: always of the same
                                                    worker, so an exchange is never half done
    (waits until the server lets it go on)
    reply (version, lead) <------------------------
    its part of the weights <----------------------

A worker talks to all servers at once. A gloo send ends only when its receiver takes it; as every
exchange is posted as a whole, no server ever waits for a worker that waits for another server.
Servers compute on the CPU, so these messages go over gloo also where workers have GPUs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Kind(enum.IntEnum):
    """What a worker wants of a server."""

    GRADIENT = 0  # it ends a step with a gradient, which follows
    SKIPPED = 1  # it ends a step that was over before it began, without one
    OFFER = 2  # it begins a step, and offers its microbatches (only with `reassign`)
    CLAIM = 3  # it is ready for a microbatch (only with `reassign`)


class Tag(enum.IntEnum):
    """Keeps messages of different meaning apart, whatever their order."""

    HEADER = 1
    GRADIENT = 2
    REPLY = 3
    WEIGHTS = 4
    OFFER = 5
    CLAIMED = 6
    MICROBATCH = 7


HEADER_NUMBERS, REPLY_NUMBERS = 4, 2  # int64 each


class Wire:
    """Sends and receives tensors of the CPU."""

    def __init__(self, servers: Sequence[int]) -> None:
        """Use the default group if it is gloo's, else make one; all ranks construct this."""
        is_gloo = dist.get_backend() == "gloo"
        self._servers = servers
        self.waited_seconds = 0.0  # of a worker, in its last exchange
        self._group = None if is_gloo else cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._among_servers = cast(dist.ProcessGroup, dist.new_group(list(servers), backend="gloo"))

    def send(self, tensor: Tensor, rank: int, tag: Tag) -> None:
        """Send, and wait until it is taken."""
        dist.send(tensor, rank, group=self._group, tag=tag)

    def receive(self, tensor: Tensor, rank: int, tag: Tag) -> Tensor:
        """Fill `tensor` from one rank, and return it."""
        dist.recv(tensor, rank, group=self._group, tag=tag)
        return tensor

    def receive_header(self) -> tuple[int, Kind, int, int, float]:
        """Wait for any worker; return its rank, and kind, step, version and age of its header.

        The age, in seconds, is how long the worker has waited for this server: it is right where
        their clocks are.
        """
        header = torch.empty(HEADER_NUMBERS, dtype=torch.int64)
        rank = dist.recv(header, group=self._group, tag=Tag.HEADER)
        kind, step, version, sent_ns = header.tolist()
        return rank, Kind(kind), step, version, max(0, time.time_ns() - sent_ns) / 1e9

    def exchange(
        self,
        headers: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
        weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """Send all servers at once header and gradient; only workers call this.

        Fills the piece of `weights` of each server; returns version and lead, (2,), of each.
        """
        works, replies = [], []
        for index, (server, piece) in enumerate(zip(self._servers, weights, strict=True)):
            replies.append(torch.empty(REPLY_NUMBERS, dtype=torch.int64))
            works.append(self._start_send(headers[index], server, Tag.HEADER))
            if gradients is not None:
                works.append(self._start_send(gradients[index], server, Tag.GRADIENT))
            works.append(self._start_receive(replies[-1], server, Tag.REPLY))
            works.append(self._start_receive(piece, server, Tag.WEIGHTS))
        self._wait(work.wait for work in works)
        return replies

    def _wait(self, waits: Iterable[Callable[[], Result]]) -> list[Result]:
        """Wait for all and return what they do; what this thread computes meanwhile is no wait."""
        began, computed = time.perf_counter(), time.thread_time()
        results = [wait() for wait in waits]
        self.waited_seconds = time.perf_counter() - began - (time.thread_time() - computed)
        return results

    def close(self) -> None:
        """Let go of what process groups do not."""

    def sum_over_servers(self, number: Tensor) -> Tensor:
        """Add up a number of each server, in place; only servers call this."""
        dist.all_reduce(number, group=self._among_servers)
        return number

    def _start_send(self, tensor: Tensor, rank: int, tag: Tag) -> dist.Work:
        """Begin to send; the tensor must live until the end."""
        work = dist.isend(tensor, rank, group=self._group, tag=tag)
        assert work is not None  # this rank is a member of the group
        return work

    def _start_receive(self, tensor: Tensor, rank: int, tag: Tag) -> dist.Work:
        """Begin to receive."""
        work = dist.irecv(tensor, rank, group=self._group, tag=tag)
        assert work is not None
        return work


def header(kind: Kind, step: int, version: int) -> Tensor:
    """Return the first message of an exchange, which says when it was sent."""
    return torch.tensor([kind, step, version, time.time_ns()], dtype=torch.int64)
