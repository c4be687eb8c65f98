"""A worker: computes gradients, and exchanges them with the servers for weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

import rankscope
from rankscope_trainer.data import Sample
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.strategies.parameter_server.layout import Layout, can_recut, shard_sizes
from rankscope_trainer.strategies.parameter_server.reassignment import SharedWork
from rankscope_trainer.strategies.parameter_server.server import Server, build_wire, pieces_of
from rankscope_trainer.strategies.parameter_server.wire import Kind, header
from rankscope_trainer.strategies.strategy import (
    Strategy,
    accumulate_gradient,
    build_model,
    build_optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


def worker_or_server(settings: Settings, world: World) -> Strategy:
    """Build this rank's part."""
    is_server = world.rank in Layout.of(settings, world.world_size).servers
    return Server(settings, world) if is_server else Worker(settings, world)


class Worker(Strategy):
    """Computes gradients with the weights that it last got, and exchanges them for newer ones."""

    is_replicated = False
    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Build the model; its first weights are those that the servers cut up as well."""
        self._layout = layout = Layout.of(settings, world.world_size)
        self.can_recut = can_recut(settings)
        self.microbatches = settings.microbatches_for(world.world_size)
        self.shard, self.num_shards = layout.workers.index(world.rank), len(layout.workers)
        self.writes_losses = self.shard == 0
        self.model = build_model(settings).to(world.device)
        self.optimizer = build_optimizer(settings, self.model)  # never steps: the servers' do
        self._is_sync = settings.consistency == "sync"
        self._skips = settings.backup_workers > 0
        num_weights = sum(parameter.numel() for parameter in self.model.parameters())
        self._sizes = shard_sizes(settings, num_weights)
        self._device = world.device
        self._wire = build_wire(settings, world, layout)
        self._work = SharedWork(self._wire, layout.servers[0]) if settings.reassign else None
        self._step = 0
        self._reported_step = 0  # the last one that the servers know this worker ended
        self._versions = [0] * settings.servers  # of the weights in use, by server
        self._measured: dict[str, float] = {}

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Compute the gradient, unless the servers did not wait for it and went on."""
        self._step += 1
        self._measured = {"weight_version": min(self._versions)}
        if self._is_over():
            self._measured["skipped"] = 1
            return None
        if self._work is None:
            return accumulate_gradient(self.model, batch, self.microbatches)
        return self._train_shared(self._work, batch)

    def clip(self, max_norm: float) -> float | None:
        """Clip this worker's gradient; in sync mode the servers clip the mean of all."""
        if self._is_sync or self._is_over():
            return None
        return super().clip(max_norm)

    def update(self) -> None:
        """Exchange the gradient for new weights."""
        if not self._is_over():
            self._exchange(Kind.GRADIENT)
        self.optimizer.zero_grad(set_to_none=True)
        rankscope.step(self._step)  # the agent would wait for an optimizer's step

    def settle(self) -> None:
        """Report skipped steps to the servers, so that they need not wait for them."""
        if self._reported_step < self._step:
            self._exchange(Kind.SKIPPED)

    def close(self) -> None:
        """Leave the servers."""
        self._wire.close()

    def metrics(self) -> dict[str, float]:
        """Return the version trained with, the lead over the slowest, the time it waited."""
        return self._measured

    def state(self) -> dict[str, Any]:
        """Return how far this worker is."""
        return {"step": self._step, "versions": self._versions}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there; the weights in use are the model's."""
        self._step = self._reported_step = state["step"]
        self._versions = state["versions"]

    def recut(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take the weights of all servers."""
        pieces = pieces_of(parts)
        whole = torch.cat([piece["model"]["weights"] for piece in pieces])
        vector_to_parameters(whole.to(self._device), self.model.parameters())
        self._step = self._reported_step = pieces[0]["strategy"]["step"]
        self._versions = [self._step] * len(self._versions)

    def checkpoint_shape(self) -> dict[str, str]:
        """Return which rank holds which piece of the weights."""
        return self._layout.describe(self._sizes)

    def _is_over(self) -> bool:
        """Return whether every server closed this step without this worker's gradient."""
        return self._skips and min(self._versions) >= self._step

    def _train_shared(self, work: SharedWork, batch: Sample) -> Tensor | None:
        """Train own microbatches, then those of workers that are behind; divide all alike."""
        losses: list[Tensor] = []
        for bytes_BT, next_BT in work.microbatches(batch, self.microbatches, self._step):
            loss = next_byte_loss(self.model(bytes_BT), next_BT)
            (loss / self.microbatches).backward()
            losses.append(loss.detach())
        self._measured |= {"microbatches": len(losses), "helped_microbatches": work.num_helped}
        return torch.stack(losses).mean() if losses else None

    def _exchange(self, kind: Kind) -> None:
        """Send each server its piece of the gradient, and wait for its piece of the weights."""
        gradient = self._flat_gradient()
        weights = torch.empty_like(gradient)
        headers = [header(kind, self._step, version) for version in self._versions]
        sent = gradient.split(self._sizes) if kind is Kind.GRADIENT else None
        replies = self._wire.exchange(headers, sent, weights.split(self._sizes))
        self._measured["waited_seconds"] = self._wire.waited_seconds
        vector_to_parameters(weights.to(self._device), self.model.parameters())
        self._reported_step = self._step
        self._versions = [int(reply[0]) for reply in replies]
        self._measured["lead"] = max(int(reply[1]) for reply in replies)

    def _flat_gradient(self) -> Tensor:
        """Return the gradient as one vector; a worker that others helped out of all has none."""
        parts = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.model.parameters()
        ]
        return torch.cat([part.detach().flatten() for part in parts]).cpu()
