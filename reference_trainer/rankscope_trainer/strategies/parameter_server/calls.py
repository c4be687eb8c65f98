"""The same exchange by remote calls: a worker calls a method of an object that a server keeps.

    worker                                                server
    inbox.rpc_async().take(gradient, ...) --------------> puts it into its inbox, and answers later
    (waits for the future)                                takes it from there, as if it had been
                                                          sent, and applies it
    version, lead, weights <----------------------------- sets the result of the call

`inbox` is an RRef, a reference to an object of another process; what arrives is served by threads
of the library (`torch.distributed.rpc`, TensorPipe), so a server takes calls while it computes.
Such a thread must not wait until a worker may continue, for there are only a few: `async_execution`
lets it return a future at once, whose result is sent when there is one.

Calls pass by the process group, and so by what counts its messages: what is sent in a step is as
large as in `wire.py`, but only the norm that servers add up is seen there.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public
    Store,
    TCPStore,
    register_rendezvous_handler,
    rpc,
)
from torch.futures import Future

from rankscope_trainer.strategies.parameter_server.wire import Kind, Tag, Wire

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

MEETING = "trainer"  # scheme of the address at which ranks meet
Answer: TypeAlias = tuple[Tensor, Tensor]  # version and lead, weights


class Call(NamedTuple):
    """What a worker asks of a server."""

    worker: int
    kind: Kind
    step: int
    version: int
    sent_ns: int
    gradient: Tensor | None
    answer: Future[Answer]


class Inbox:
    """The calls that a server has not taken yet."""

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()
        self._wanted: Future[Call] | None = None  # by the server, which waits for it

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def take(self, worker: int, header: list[int], gradient: Tensor | None) -> Future[Answer]:
        """Keep a call; runs in a thread of the library."""
        answer: Future[Answer] = Future()
        kind, step, version, sent_ns = header
        call = Call(worker, Kind(kind), step, version, sent_ns, gradient, answer)
        with self._lock:
            wanted, self._wanted = self._wanted, None
            if wanted is None:
                self._calls.append(call)
        if wanted is not None:
            wanted.set_result(call)
        return answer

    def next(self) -> Call:
        """Return the oldest call, or wait for one: as for an answer, so that it shows as a wait."""
        with self._lock:
            if self._calls:
                return self._calls.popleft()
            wanted = self._wanted = Future[Call]()
        return wanted.wait()


@functools.cache
def own_inbox() -> Inbox:
    """Return the inbox of this process, of which there is one: workers call this, too."""
    return Inbox()


class Calls(Wire):
    """A wire whose messages are arguments and results of calls."""

    def __init__(self, servers: Sequence[int], settings: Settings, world: World) -> None:
        """Let all ranks know each other by name, and workers the servers' inboxes."""
        super().__init__(servers)
        self._rank = world.rank
        self._servers = servers
        self._taken: dict[int, Call] = {}
        self._replies: dict[int, Tensor] = {}
        own_inbox()  # before a call could make it
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"{MEETING}://", rpc_timeout=settings.timeout_seconds
        )
        with warnings.catch_warnings():
            # PyTorch's own use of its own group
            warnings.filterwarnings("ignore", "You are using a Backend")
            rpc.init_rpc(
                _name(world.rank),
                rank=world.rank,
                world_size=world.world_size,
                rpc_backend_options=options,
            )
        is_worker = world.rank not in servers
        self._inboxes = [rpc.remote(_name(rank), own_inbox) for rank in servers if is_worker]

    def exchange(
        self,
        headers: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
        weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """Call all servers at once; fill `weights`, and return version and lead of each."""
        sent: Sequence[Tensor | None] = gradients or [None] * len(headers)
        answers = [
            inbox.rpc_async().take(self._rank, header.tolist(), gradient)
            for inbox, header, gradient in zip(self._inboxes, headers, sent, strict=True)
        ]
        replies = self._wait(answer.wait for answer in answers)
        for (_, newest), piece in zip(replies, weights, strict=True):
            piece.copy_(newest)
        return [reply for reply, _ in replies]

    def receive_header(self) -> tuple[int, Kind, int, int, float]:
        """Take the oldest call; return worker, kind, step, version, and for how long it waited."""
        call = own_inbox().next()
        self._taken[call.worker] = call
        waited_seconds = max(0, time.time_ns() - call.sent_ns) / 1e9
        return call.worker, call.kind, call.step, call.version, waited_seconds

    def receive(self, tensor: Tensor, rank: int, tag: Tag) -> Tensor:
        """Return the gradient of the call that was taken last."""
        gradient = self._taken[rank].gradient
        assert gradient is not None
        return gradient

    def send(self, tensor: Tensor, rank: int, tag: Tag) -> None:
        """Answer a worker's call, once its weights are there as well."""
        if tag is Tag.REPLY:
            self._replies[rank] = tensor
        else:
            # It is sent by another thread, while an update may already change the weights.
            self._taken.pop(rank).answer.set_result((self._replies.pop(rank), tensor.clone()))

    def close(self) -> None:
        """Leave together; after a failure alone, as another rank may have died of it."""
        self._inboxes.clear()  # references of others to an object keep its owner
        rpc.shutdown(graceful=sys.exception() is None)


def _name(rank: int) -> str:
    return f"rank{rank}"


def _meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield a store that only this attempt knows, rank and number of ranks: all ranks call this.

    PyTorch's own ways lead to the store of torchrun, which keeps what an earlier attempt left.
    """
    host = os.environ.get("MASTER_ADDR", "localhost")
    rank, port = dist.get_rank(), torch.zeros((), dtype=torch.int64)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port.fill_(store.port)
    dist.broadcast(port, src=0)
    yield store or TCPStore(host, int(port)), rank, dist.get_world_size()


register_rendezvous_handler(MEETING, _meet)
