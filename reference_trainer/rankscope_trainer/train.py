"""The training loop, the same for every strategy."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from rankscope_trainer.checkpoint import Checkpoints, Progress
from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.faults.fault import Place
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.faults.manifest import Manifest
from rankscope_trainer.faults.plan import parse_fault
from rankscope_trainer.report import Report
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies import STRATEGIES
from rankscope_trainer.strategies.strategy import Strategy
from rankscope_trainer.world import World, join_world, leave_world

# A checkpoint goes on exactly only in a run whose model and order of data are the same.
RESUMED_WITH_THE_SAME = (
    "strategy", "layers", "width", "heads", "context",
    "batch_size", "microbatches", "data_bytes", "validation_ratio", "seed",
)  # fmt: skip

logger = logging.getLogger("rankscope_trainer")


def train(settings: Settings) -> None:
    """Join the other ranks, train, and leave the process group in order."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    world = join_world(device=settings.device, timeout_seconds=settings.timeout_seconds)
    Trainer(settings, world).run()
    # Only here: after a failure some other rank may be dead, and a process group that still has
    # work to do with it waits. The end of the process closes the connections just as well.
    leave_world()


class Trainer:
    """One rank's model, data and optimizer, and the loop over the steps."""

    def __init__(self, settings: Settings, world: World) -> None:
        """Build all parts; each is a file of its own."""
        self.settings = settings
        self.world = world
        self.strategy = STRATEGIES[settings.strategy](settings, world)
        self.optimizer = torch.optim.AdamW(
            self.strategy.model.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        self.faults = Injector(
            [parse_fault(text, world.world_size, settings.steps) for text in settings.fault],
            rank=world.rank,
            microbatches=self.strategy.microbatches,
            manifest=Manifest(settings.fault_manifest),
        )
        self.faults.inject_into(self.strategy.model)
        self.batches, self.validation_batches = _build_data(settings, self.strategy, self.faults)
        self.report = Report(
            log_every=settings.log_every,
            tokens_per_step=self._tokens_per_step(),
            losses=settings.losses if self.strategy.writes_losses else "",
        )
        self.checkpoints = _build_checkpoints(settings, world)
        # From here on random numbers mean dropout, which differs between ranks.
        torch.manual_seed(settings.seed + world.rank)

    def run(self) -> None:
        """Train from the newest checkpoint, or from the first step, to the last."""
        step = self._resume()
        with contextlib.closing(self.report), contextlib.closing(self.faults):
            batches = iter(self.batches)
            while step < self.settings.steps:
                step += 1
                self.faults.begin_step(step)
                loss = self._train_step(batches)
                known = None if loss is None else float(loss)
                self.report.step(step, known, self.optimizer.param_groups[0]["lr"])
                self._after(step)

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor | None:
        bytes_BT, next_BT = next(batches)
        self.faults.fire(Place.BEFORE_FORWARD)
        device = self.world.device
        loss = self.strategy.train_batch((bytes_BT.to(device), next_BT.to(device)))
        if self.settings.clip:
            self.strategy.clip(self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _after(self, step: int) -> None:
        """Validate and write a checkpoint where they are due."""
        every = self.settings.validate_every
        if every and step % every == 0:
            self.report.validation(step, self._validate())
        if self.checkpoints is not None and step % self.settings.checkpoint_every == 0:
            self.checkpoints.save(
                Progress(step=step, position=self.batches.position),
                self.strategy.model,
                self.optimizer,
                has_weights=not self.strategy.is_replicated or self.world.rank == 0,
            )

    def _validate(self) -> float | None:
        """Return the mean loss of the first validation batches, where this rank knows it."""
        assert self.validation_batches is not None
        self.validation_batches.position = 0
        self.strategy.model.eval()
        losses: list[Tensor] = []
        with torch.no_grad():
            batches = iter(self.validation_batches)
            for _ in range(self.settings.validate_batches):
                bytes_BT, next_BT = next(batches)
                device = self.world.device
                loss = self.strategy.validate_batch((bytes_BT.to(device), next_BT.to(device)))
                losses += [] if loss is None else [loss]
        self.strategy.model.train()
        return float(torch.stack(losses).mean()) if losses else None

    def _resume(self) -> int:
        """Return the step after which training goes on."""
        if self.checkpoints is None or not self.settings.resume:
            return 0
        step = self.checkpoints.newest_step()
        if not step:
            return 0
        self.strategy.warm_up()
        part = 0 if self.strategy.is_replicated else self.world.rank
        progress = self.checkpoints.load(step, self.strategy.model, self.optimizer, part=part)
        self.batches.position = progress.position
        logger.info("resumed after step %d", progress.step)
        return progress.step

    def _tokens_per_step(self) -> int:
        """Count the tokens of a step over all ranks; pipeline ranks share the same ones."""
        sequences = self.settings.batch_size * self.strategy.microbatches
        return sequences * self.settings.context * self.strategy.num_shards


def _build_data(
    settings: Settings, strategy: Strategy, faults: Injector
) -> tuple[Batches, Batches | None]:
    text = read_standard_library(settings.data_bytes)
    training, validation = split_text(text, settings.validation_ratio)
    batch_size = settings.batch_size * strategy.microbatches
    training_batches = Batches(
        ByteWindows(training, settings.context),
        batch_size=batch_size,
        shard=strategy.shard,
        num_shards=strategy.num_shards,
        seed=settings.seed,
        on_load=lambda: faults.fire(Place.DATA),
    )
    if not settings.validate_every:
        return training_batches, None
    validation_batches = Batches(
        ByteWindows(validation, settings.context),
        batch_size=batch_size,
        shard=strategy.shard,
        num_shards=strategy.num_shards,
        seed=settings.seed,
    )
    return training_batches, validation_batches


def _build_checkpoints(settings: Settings, world: World) -> Checkpoints | None:
    if not settings.checkpoint_dir:
        return None
    shape = {name: getattr(settings, name) for name in RESUMED_WITH_THE_SAME}
    checkpoints = Checkpoints(
        settings.checkpoint_dir, keep=settings.checkpoint_keep, world=world, shape=shape
    )
    if world.rank == 0:
        checkpoints.remove_unfinished()
    return checkpoints
