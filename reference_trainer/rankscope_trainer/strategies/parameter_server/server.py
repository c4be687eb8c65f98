"""A parameter server: keeps one piece of the weights, and answers workers as they come.

    loop of a server                         a step of a server
      header from any worker                   sync           enough gradients, then one update
      its gradient: kept, applied or dropped   async,bounded  as many gradients as workers,
      weights to every worker that may go on                  each applied as it comes

Two counts decide and are reported, exactly, as metrics: the `version` of the weights (updates so
far) and the `clock` of each worker (its last finished step).

    staleness   version when a gradient is applied - version it was computed with; 0 in sync
    lead        clock of a worker as it goes on - clock of the slowest; bounded: <= `staleness`
    dropped     gradients that came after their step was closed (only with backup workers)
    skipped     steps that a worker did not even begin, as they were closed before
    queue       seconds for which gradients waited until the server took them
    busy        seconds in which the server did not wait for a worker

used + dropped + skipped gradients are workers x steps, at every checkpoint and at the end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import rankscope
from rankscope_trainer.data import Sample
from rankscope_trainer.strategies.parameter_server.layout import Layout, can_recut, shard_sizes
from rankscope_trainer.strategies.parameter_server.reassignment import WorkPool
from rankscope_trainer.strategies.parameter_server.wire import Kind, Tag, Wire
from rankscope_trainer.strategies.strategy import Strategy, build_model, build_optimizer
from rankscope_trainer.strategies.versions import require_rpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


def build_wire(settings: Settings, world: World, layout: Layout) -> Wire:
    """Let ranks send to each other, or call each other."""
    if settings.exchange == "calls":
        require_rpc()
        from rankscope_trainer.strategies.parameter_server.calls import Calls  # PyTorch may lack it

        return Calls(layout.servers, settings, world)
    return Wire(layout.servers)


def pieces_of(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of a checkpoint that servers wrote, in the order of their pieces."""
    return [part for part in parts if part["parameters"] == ["weights"]]


class Shard(nn.Module):
    """One piece of the weights, as a vector."""

    def __init__(self, weights: Tensor) -> None:
        """Keep a copy."""
        super().__init__()
        self.weights = nn.Parameter(weights.detach().clone())


class Server(Strategy):
    """Holds a piece of the weights and its optimizer."""

    is_replicated = reports_loss = writes_losses = False
    needs_data = False
    shard = 0

    def __init__(self, settings: Settings, world: World) -> None:
        """Cut this server's piece out of the first weights, which all ranks draw alike."""
        self._layout = layout = Layout.of(settings, world.world_size)
        self.can_recut = can_recut(settings)
        self.microbatches = settings.microbatches_for(world.world_size)
        self.num_shards = len(layout.workers)
        whole = nn.utils.parameters_to_vector(build_model(settings).parameters())
        self._sizes = shard_sizes(settings, whole.numel())
        self._index = layout.servers.index(world.rank)
        shard = Shard(whole.split(self._sizes)[self._index])
        self.model, self._weights = shard, shard.weights
        self.optimizer = build_optimizer(settings, self.model)
        self._consistency, self._staleness = settings.consistency, settings.staleness
        self._needed = len(layout.workers) - settings.backup_workers  # gradients of a sync step
        self._wire = build_wire(settings, world, layout)
        is_coordinator = settings.reassign and world.rank == layout.servers[0]
        self._work = WorkPool(self._wire, settings, layout.workers) if is_coordinator else None
        self._step = 0
        self._version = 0
        self._clock = dict.fromkeys(layout.workers, 0)
        self._fresh: dict[int, Tensor] = {}  # gradients of this sync step, by worker
        self._waiting: list[int] = []  # workers that may not go on yet
        self._counts = {"used": 0, "dropped": 0, "skipped": 0}
        self._ages: list[int] = []  # staleness of each gradient used in this step
        self._requests = self._moved_bytes = 0  # gradients taken, and bytes of them and of answers
        self._lead = 0  # largest granted in this step
        self._queue_seconds = self._idle_seconds = 0.0
        self._began = 0.0  # when it first served

    def train_batch(self, batch: Sample) -> None:
        """Serve until this step has its gradients."""
        self._step += 1
        self._ages, self._lead = [], 0
        if self._consistency != "sync":
            while sum(self._clock.values()) < len(self._clock) * self._step:
                self._serve()
            return
        while len(self._fresh) < self._needed:
            self._serve()
        # In the order of ranks and not of arrival, so that two runs round alike.
        total = torch.stack([self._fresh[rank] for rank in sorted(self._fresh)]).sum(0)
        self._weights.grad = total / self._needed

    def validation_loss(self, batch: Sample) -> None:
        """Leave it to the workers."""

    def clip(self, max_norm: float) -> float | None:
        """Clip the mean gradient by its norm over all servers; without sync workers clip."""
        if self._weights.grad is None:
            return None
        norm = self._wire.sum_over_servers(self._weights.grad.square().sum()).sqrt()
        nn.utils.clip_grads_with_norm_([self._weights], max_norm, norm)
        return float(norm)

    def update(self) -> None:
        """Apply the mean gradient, in sync mode, and let the workers go on."""
        if self._consistency == "sync":
            self._apply()
            self._fresh.clear()
            self._answer()
        rankscope.step(self._step)  # for the agent each gradient that is applied would be one

    def settle(self) -> None:
        """Serve until every worker has ended this step, so that nothing is in flight."""
        while min(self._clock.values()) < self._step:
            self._serve()

    def close(self) -> None:
        """Leave the workers."""
        self._wire.close()

    def metrics(self) -> dict[str, float]:
        """Return the counts: dropped, skipped and used since the start, the rest of this step."""
        moved = {} if self._work is None else {"reassigned_microbatches": self._work.num_moved}
        return {
            "weight_version": self._version,
            "staleness": sum(self._ages) / max(len(self._ages), 1),
            "staleness_max": max(self._ages, default=0),
            "lead_max": self._lead,
            "shard_bytes": self._weights.nbytes,
            f"shard_{self._index}_requests": self._requests,
            f"shard_{self._index}_bytes": self._moved_bytes,
            f"shard_{self._index}_queue_seconds": self._queue_seconds,
            f"shard_{self._index}_busy_seconds": self._busy_seconds(),
            **self._counts,
            **moved,
        }

    def state(self) -> dict[str, Any]:
        """Return all counts; gradients in flight there are none."""
        return {
            "step": self._step,
            "version": self._version,
            "clock": self._clock,
            "counts": self._counts,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self._step, self._version = state["step"], state["version"]
        self._clock, self._counts = state["clock"], state["counts"]

    def recut(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take this server's piece of the weights and of their moments."""
        pieces = pieces_of(parts)
        whole = torch.cat([piece["model"]["weights"] for piece in pieces])
        self.model.load_state_dict({"weights": self._own(whole)})
        states = [state for piece in pieces for state in piece["optimizer"]["state"].values()]
        document = self.optimizer.state_dict()
        if states:  # a number that is not one of each weight is the same for all
            document["state"][0] = {
                name: self._own(torch.cat([state[name] for state in states]))
                if first.dim()
                else first
                for name, first in states[0].items()
            }
        self.optimizer.load_state_dict(document)
        counted = pieces[0]["strategy"]
        self._step, self._version = counted["step"], counted["version"]
        self._clock = dict.fromkeys(self._clock, self._step)
        self._counts = counted["counts"]

    def _own(self, whole: Tensor) -> Tensor:
        piece: Tensor = whole.split(self._sizes)[self._index]
        return piece.clone()

    def checkpoint_shape(self) -> dict[str, str]:
        """Return which rank holds which piece of the weights."""
        return self._layout.describe(self._sizes)

    def _serve(self) -> None:
        """Take one message of any worker, and answer the workers that it allows to go on."""
        since = time.perf_counter()
        self._began = self._began or since
        worker, kind, step, version, waited_seconds = self._wire.receive_header()
        self._idle_seconds += time.perf_counter() - since
        if kind in (Kind.OFFER, Kind.CLAIM):
            assert self._work is not None
            self._work.serve(kind, worker)
            return
        if kind is Kind.GRADIENT:
            gradient = torch.empty_like(self._weights)
            self._requests += 1
            self._queue_seconds += waited_seconds
            self._moved_bytes += gradient.nbytes
            self._take(worker, step, version, self._wire.receive(gradient, worker, Tag.GRADIENT))
        # A worker that was late says nothing about the steps that it skipped until it is back.
        self._counts["skipped"] += step - self._clock[worker] - (kind is Kind.GRADIENT)
        self._clock[worker] = step
        self._waiting.append(worker)
        self._answer()

    def _busy_seconds(self) -> float:
        return time.perf_counter() - self._began - self._idle_seconds if self._began else 0.0

    def _take(self, worker: int, step: int, version: int, gradient: Tensor) -> None:
        if self._consistency == "sync" and step <= self._version:
            self._counts["dropped"] += 1
            return
        self._ages.append(self._version - version)
        self._counts["used"] += 1
        if self._consistency == "sync":
            self._fresh[worker] = gradient
        else:
            self._weights.grad = gradient
            self._apply()

    def _apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._version += 1

    def _answer(self) -> None:
        """Send the weights to every worker that waits for them and may go on."""
        for worker in [worker for worker in self._waiting if self._may_go_on(worker)]:
            self._waiting.remove(worker)
            lead = self._clock[worker] - min(self._clock.values())
            self._lead = max(self._lead, lead)
            reply = torch.tensor([self._version, lead], dtype=torch.int64)
            self._wire.send(reply, worker, Tag.REPLY)
            self._wire.send(self._weights.detach(), worker, Tag.WEIGHTS)
            self._moved_bytes += self._weights.nbytes

    def _may_go_on(self, worker: int) -> bool:
        if self._consistency == "sync":
            return self._version >= self._clock[worker]
        if self._consistency == "async":
            return True
        return self._clock[worker] - min(self._clock.values()) <= self._staleness
