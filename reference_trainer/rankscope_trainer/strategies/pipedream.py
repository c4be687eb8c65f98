"""PipeDream: a pipeline that never runs empty, at the price of old weights.

    3 stages, every F a forward and every B a backward followed at once by an update
    rank 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 ...
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 ...
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 ...

GPipe and 1F1B flush: they wait at the end of each step until every gradient is there, and then
update. Here stage i of p runs p-1-i forwards ahead and then takes turns, one forward, one
backward, for ever; each backward updates the weights. Microbatch n so meets, in the forward of
stage i, weights that lack its last p-1-i updates (fewer while the pipeline fills).

Its backward would meet newer weights than its forward did, and compute the gradient of no
function at all. With weight stashing (PipeDream's answer) the stage keeps a copy of its weights
for each microbatch in flight, and the backward uses that of the forward:

    weights in the backward of stage i      version, where the forward's was v
    with stashing                           v
    without                                 v + (p-1-i)

A version is the number of updates before it. Both are counted for every microbatch, sent to the
agent, and written to the file named by `versions`.

A step is `microbatches` microbatches, by default one, and so one update. No step flushes; nor
does a validation, for which each stage uses the weights it has. Only before a checkpoint and
after the last step does the pipeline run empty, so that no microbatch has to be saved half done.
Checkpoints so change the training a little; a resumed run equals, bit for bit, the one that wrote
the same. The loss is not that of single-process training, except with one stage.

No stage can block another for ever: a receive waits for work that does not depend on it, and
sends wait for nothing, see `Line`. A norm over all stages would need a flush, so each stage clips
by its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

import rankscope
from rankscope_trainer.data import Sample
from rankscope_trainer.json_lines import JsonLines
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.strategies.strategy import Strategy, build_model, build_optimizer

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


@dataclasses.dataclass
class Weights:
    """Weights to compute with, and how many updates they have seen."""

    tensors: dict[str, Tensor]
    version: int = 0

    def copy(self) -> Weights:
        """Return weights that later updates do not reach: a stash."""
        copies = {name: t.detach().clone().requires_grad_() for name, t in self.tensors.items()}
        return Weights(copies, self.version)


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A microbatch between its forward and its backward on this stage."""

    microbatch: int
    weights: Weights
    forward_version: int
    arrived: Tensor  # from the stage before
    left: Tensor  # for the next stage; on the last one the loss


class Line:
    """One direction of travel between the stages, in a process group of its own.

    Sends are handed over and waited for much later: when a stage sends something, its neighbour
    has already received everything but the last `num_stages` sends. Two directions in one group
    could wait for each other where the library runs a group's operations in order, as NCCL does.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, num_stages: int) -> None:
        """Nothing is under way yet."""
        self._group = cast(dist.ProcessGroup, dist.new_group())
        self._shape, self._device, self._num_stages = shape, device, num_stages
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # keeps the memory alive, too

    def send(self, tensor: Tensor, to: int) -> None:
        """Send without waiting for the receiver."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, to, group=self._group)
        assert work is not None  # this rank is a member of the group
        self._sent.append((work, tensor))
        self._wait(self._num_stages)

    def receive(self, source: int) -> Tensor:
        """Wait for the next tensor from a neighbour."""
        tensor = torch.empty(self._shape, device=self._device)
        dist.recv(tensor, source, group=self._group)
        return tensor

    def settle(self) -> None:
        """Wait until everything sent has been received."""
        self._wait(0)

    def _wait(self, at_most: int) -> None:
        while len(self._sent) > at_most:
            self._sent.popleft()[0].wait()


class PipeDream(Strategy):
    """One stage, its weights, their stashes, and the microbatches in flight."""

    shard, num_shards = 0, 1
    is_replicated = False

    def __init__(self, settings: Settings, world: World) -> None:
        """Keep this rank's layers; nothing is in flight yet."""
        self.microbatches = settings.microbatches_for(world.world_size)
        self._stage = world.rank
        self._ahead = world.world_size - 1 - world.rank  # forwards before the first backward
        self.reports_loss = self.writes_losses = self._ahead == 0
        model = build_model(settings).keep_stage(world.rank, world.world_size)
        self.model = model.to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        # `data` shares the memory, but not the counter by which autograd would notice, and
        # refuse, that an update came between a forward and its backward.
        weights = {n: p.data.requires_grad_() for n, p in self.model.named_parameters()}
        self._newest = self._stash = Weights(weights)
        self._stashes = settings.weight_stashing and self._ahead > 0
        self._max_norm = settings.clip or math.inf
        self._norm: float | None = None
        self._in_flight: deque[InFlight] = deque()
        self._forwards = self._step = 0
        shape = (settings.batch_size, settings.context, settings.width)
        self._activations = Line(shape, world.device, world.world_size)
        self._gradients = Line(shape, world.device, world.world_size)
        rankscope.stage(world.rank, world.world_size, schedule="PipeDream")
        self._versions = JsonLines(settings.versions)
        self._metrics: dict[str, float] = {}

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Take in each microbatch; do the backward of the one that is due."""
        self._step += 1
        self._metrics = {}
        losses: list[Tensor] = []
        for microbatch in self._split(batch):
            losses.append(self._forward(microbatch).detach())
            if len(self._in_flight) > self._ahead:
                self._backward()
        return torch.stack(losses).mean() if self.reports_loss else None

    def validation_loss(self, batch: Sample) -> Tensor | None:
        """Run forwards only, with the newest weights; what is in flight stays there."""
        losses = [self._pass_on(microbatch, self._newest)[1] for microbatch in self._split(batch)]
        return torch.stack(losses).mean() if self.reports_loss else None

    def clip(self, max_norm: float) -> float | None:
        """Return the norm of this stage's last gradient, which was clipped before its update."""
        return self._norm

    def update(self) -> None:
        """End the step for the agent: the updates came with the backwards, in some steps none."""
        rankscope.step(self._step)

    def settle(self) -> None:
        """Run empty: only backwards, until nothing is in flight."""
        while self._in_flight:
            self._backward()
        self._activations.settle()
        self._gradients.settle()

    def metrics(self) -> dict[str, float]:
        """Return the versions of the microbatch that was finished last in this step."""
        return self._metrics

    def state(self) -> dict[str, Any]:
        """Return how far the stage is: nothing is in flight, so all counts are in two numbers."""
        return {"step": self._step, "version": self._newest.version}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        self._step = state["step"]
        self._forwards = self._newest.version = state["version"]
        self._stash = self._newest

    def _split(self, batch: Sample) -> list[Sample]:
        inputs, targets = (half.chunk(self.microbatches) for half in batch)
        return list(zip(inputs, targets, strict=True))

    def _forward(self, sample: Sample) -> Tensor:
        weights = self._weights()
        arrived, left = self._pass_on(sample, weights)
        self._in_flight.append(InFlight(self._forwards, weights, weights.version, arrived, left))
        self._forwards += 1
        return left

    def _weights(self) -> Weights:
        """Return the weights for a forward: the newest, or a copy that stays as they are now."""
        if not self._stashes:
            return self._newest
        if self._stash is self._newest or self._stash.version != self._newest.version:
            self._stash = self._newest.copy()  # the one before lives while its microbatch does
        return self._stash

    def _pass_on(self, sample: Sample, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return what arrived, and what left for the next stage (on the last one: the loss)."""
        arrived, next_BT = sample
        if self._stage:
            arrived = self._activations.receive(self._stage - 1).requires_grad_()
        left: Tensor = functional_call(self.model, weights.tensors, (arrived,))
        if self.reports_loss:
            return arrived, next_byte_loss(left, next_BT)
        self._activations.send(left.detach(), self._stage + 1)
        return arrived, left

    def _backward(self) -> None:
        """Compute the oldest microbatch's gradient, pass it on, and update at once."""
        oldest = self._in_flight.popleft()
        gradient = None if self.reports_loss else self._gradients.receive(self._stage + 1)
        oldest.left.backward(gradient)
        if self._stage:
            assert oldest.arrived.grad is not None
            self._gradients.send(oldest.arrived.grad, self._stage - 1)
        self._count(oldest)
        for name, parameter in self.model.named_parameters():
            used = oldest.weights.tensors[name]
            parameter.grad, used.grad = used.grad, None
        parameters = self.model.parameters()
        self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._newest.version += 1

    def _count(self, done: InFlight) -> None:
        """Report which weights a microbatch met; those of the backward count themselves."""
        forward, backward = done.forward_version, done.weights.version
        versions = {"forward_version": forward, "backward_version": backward}
        applied = self._newest.version
        stamps = {"version_read": forward, "version_backward": backward, "version_applied": applied}
        self._metrics = {name: float(number) for name, number in (versions | stamps).items()}
        self._versions.write(stage=self._stage, microbatch=done.microbatch, **versions)
