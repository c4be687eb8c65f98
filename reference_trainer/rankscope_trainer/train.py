"""The training loop, the same for every strategy."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from rankscope_trainer.checkpoint import Checkpoints, Progress
from rankscope_trainer.data import (
    Batches,
    ByteWindows,
    Sample,
    checksum,
    read_standard_library,
    split_text,
)
from rankscope_trainer.duration import Duration
from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import PLACES_OF_LOADING, Place
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.faults.plan import parse_fault
from rankscope_trainer.json_lines import JsonLines
from rankscope_trainer.learning_rate import changes_learning_rate, doubt, learning_rate
from rankscope_trainer.patience import Patience, agreed_mean
from rankscope_trainer.report import Report
from rankscope_trainer.settings import Settings
from rankscope_trainer.source import DataSource, FileWindows, open_source
from rankscope_trainer.step_times import StepTimes
from rankscope_trainer.stopping import Stopped, Stopping
from rankscope_trainer.strategies import STRATEGIES
from rankscope_trainer.strategies.strategy import Strategy
from rankscope_trainer.strategies.uneven import last_steps
from rankscope_trainer.supply import Supply
from rankscope_trainer.world import World, join_world, leave_world

# A checkpoint goes on exactly only in a run whose model and order of data are the same.
RESUMED_WITH_THE_SAME = (
    "strategy",
    "layers",
    "width",
    "heads",
    "context",
    "batch_size",
    "microbatches",
    "global_batch",
    "data_bytes",
    "data_path",
    "validation_ratio",
    "seed",
)

logger = logging.getLogger("rankscope_trainer")


def train(settings: Settings, stopping: Stopping | None = None) -> None:
    """Join the other ranks, train, and leave the process group in order."""
    stopping = stopping or Stopping()
    stopping.give_grace(settings.grace_seconds)  # a notice may come before the first step
    settings, faults = prepare(settings)
    world = join_world(device=settings.device, timeout_seconds=settings.timeout_seconds)
    signal = Trainer(settings, world, faults, stopping).run()
    # Only here: after a failure some other rank may be dead, and a process group that still has
    # work to do with it waits. The end of the process closes the connections just as well.
    leave_world()
    if signal:
        logger.warning("left after signal %d, together with all ranks", signal)
        raise Stopped(128 + signal)


def prepare(settings: Settings) -> tuple[Settings, Injector]:
    """Do what comes before any group: threads, faults; return the settings that these leave."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    faults = build_faults(settings)
    return faults.start(settings), faults


class Trainer:
    """One rank's model, data and optimizer, and the loop over the steps."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        faults: Injector | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        """Build all parts; each is a file of its own."""
        self.settings = settings
        self.world = world
        self.strategy = STRATEGIES[settings.strategy].build(settings, world)
        self._last_steps = last_steps(settings, world.world_size)
        self.faults = faults or build_faults(settings)
        self.batches, self.validation_batches = build_data(settings, self.strategy, self.faults)
        self.report = Report(
            log_every=settings.log_every,
            tokens_per_step=self._tokens_per_step(),
            losses=settings.losses if self.strategy.writes_losses else "",
            is_for_job=self.strategy.writes_losses,
        )
        self.times = StepTimes(settings.step_times, rank=world.rank, restarts=world.restarts)
        self.checkpoints = build_checkpoints(settings, world, self.strategy)
        self.patience = Patience(settings.patience, world.device, agrees=settings.keep_best)
        self._losses: list[float] = []  # known here, since the last checkpoint
        self.stopping = stopping or Stopping()
        self.faults.attach(self)
        if world.rank == 0 and (text := doubt(settings)):
            logger.warning("%s", text)
        # From here on random numbers mean dropout, which differs between ranks.
        torch.manual_seed(settings.seed + world.rank)

    def run(self) -> int:
        """Train from the newest checkpoint, or from the first step, to the last.

        Returns the signal for which all ranks left before that, or 0.
        """
        step = self._saved = self._resume()
        self._duration = Duration(self.settings.least_seconds, step, self.world.device)
        supply = self._build_supply()
        with (
            contextlib.closing(self.strategy),
            contextlib.closing(self.report),
            contextlib.closing(self.times),
            contextlib.closing(self.faults),
            self.strategy.uneven(),
        ):
            while self._has_more(step) and not self.patience.is_exhausted:
                step += 1
                if not self._advance(step, supply):
                    break
            self.strategy.settle()
        return supply.must_leave

    def _advance(self, step: int, supply: Supply) -> bool:
        """Train a step and do what is due after it; return False if all ranks leave instead."""
        self.times.begin()
        self.faults.begin_step(step)
        batch = supply.next(step)
        if batch is None:
            return False
        loss, measured = self._train_step(step, batch)
        known_loss = None if loss is None else float(loss)
        learning_rate = self.strategy.optimizer.param_groups[0]["lr"]
        own = self.strategy.metrics()
        self.report.step(step, known_loss, learning_rate, **own, **measured)
        self.times.trained()
        if known_loss is not None and self.settings.keep_best:
            self._losses.append(known_loss)
        self._after(step)
        self.times.end(step, own.get("waited_seconds"))
        return True

    def _has_more(self, step: int) -> bool:
        """Return whether a step follows this one; at the last, all ranks agree on some more."""
        last = self._last_steps[self.world.rank]
        if step == last:
            more = self._duration.steps_left(step)
            self._last_steps = [last + more for last in self._last_steps]
            last += more
        return step < last

    def _build_supply(self) -> Supply:
        return Supply(
            self.batches,
            self.settings,
            self.world.device,
            needs_data=self.strategy.needs_data,
            on_batch=lambda batch: self.faults.visit(Place.BATCH, batch=batch),
            on_skip=self.report.skipped,
            save=self._save,
            signal=lambda: self.stopping.received,
        )

    def _train_step(self, step: int, batch: Sample) -> tuple[Tensor | None, dict[str, float]]:
        """Return the loss, where known, and what else was measured."""
        bytes_BT, next_BT = batch
        settings = self.settings
        measured: dict[str, float] = {}
        if changes_learning_rate(settings):
            global_batch = sum(batch_sizes(settings, self.strategy))
            for group in self.strategy.optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, global_batch)
        self.faults.fire(Place.BEFORE_FORWARD)
        device = self.world.device
        loss = self.strategy.train_batch((bytes_BT.to(device), next_BT.to(device)))
        self.faults.fire(Place.BEFORE_UPDATE)
        if settings.takes_norm:
            norm = self.strategy.clip(settings.clip or math.inf)
            measured = {} if norm is None else {"gradient_norm": norm}
        self._agree_to_update(step, loss)
        self.strategy.update()
        self.faults.fire(Place.AFTER_UPDATE)
        return loss, measured

    def _agree_to_update(self, step: int, loss: Tensor | None) -> None:
        """Return once the ranks are agreed that they all update; most have nothing to agree on."""

    def _after(self, step: int) -> None:
        """Validate and write a checkpoint where they are due."""
        every = self.settings.validate_every
        validated: float | None = None
        if every and step % every == 0:
            validated = self.patience.observe(self._validate())
            self.report.validation(step, validated)
        is_last = self.patience.is_exhausted
        if is_last:
            logger.info("stopped early after step %d: validation does not improve", step)
        if is_last or step % self.settings.checkpoint_every == 0:
            self._save(step, self._loss_of_checkpoint(validated))

    def _loss_of_checkpoint(self, validated: float | None) -> float | None:
        """Return the loss by which a checkpoint may be the best one; all ranks call this."""
        losses, self._losses = self._losses, []
        if not self.settings.keep_best or self.settings.validate_every:
            return validated
        own = math.fsum(losses) / len(losses) if losses else None
        return agreed_mean(own, self.world.device)

    def _save(self, step: int, loss: float | None = None) -> None:
        """Write a checkpoint, unless there is one of this step already."""
        if self.checkpoints is None or step == self._saved:
            return
        if step > min(self._last_steps):
            return  # a rank that ran out of batches cannot take part
        self.strategy.settle()
        progress = Progress(
            step=step,
            position=self.batches.position,
            best_validation=self.patience.best if self.patience.best < math.inf else None,
            validations_in_vain=self.patience.in_vain,
            loss=loss,
        )
        self.faults.fire(Place.CHECKPOINT)
        has_weights = not self.strategy.is_replicated or self.world.rank == 0
        self.checkpoints.save(progress, self.strategy, has_weights=has_weights)
        self._saved = step

    def _validate(self) -> float | None:
        """Return the mean loss of the first validation batches, where this rank knows it."""
        assert self.validation_batches is not None
        self.validation_batches.position = 0
        self.strategy.model.eval()
        losses: list[Tensor] = []
        with torch.no_grad():
            batches = iter(self.validation_batches)
            for _ in range(self.settings.validate_batches):
                has_data = self.strategy.needs_data
                bytes_BT, next_BT = next(batches) if has_data else self.validation_batches.skip()
                device = self.world.device
                loss = self.strategy.validation_loss((bytes_BT.to(device), next_BT.to(device)))
                losses += [] if loss is None else [loss]
        self.strategy.model.train()
        return float(torch.stack(losses).mean()) if losses else None

    def _resume(self) -> int:
        """Return the step after which training goes on."""
        if self.checkpoints is not None and self.world.rank == 0:
            self.checkpoints.remove_unfinished()
        if self.checkpoints is None or not self.settings.resume:
            return 0
        is_best = self.settings.resume_from == "best"
        step = self.checkpoints.best_step() if is_best else self.checkpoints.newest_step()
        if self.world.rank == 0:
            self._report_attempt(self.checkpoints, step)
        if not step:
            return 0
        self.strategy.warm_up()
        is_whole = self.strategy.is_replicated or self.strategy.is_sharded
        part = 0 if is_whole else self.world.rank
        progress = self.checkpoints.load(step, self.strategy, part=part)
        self.batches.position = progress.position
        if progress.best_validation is not None:
            self.patience.best = progress.best_validation
            self.patience.in_vain = progress.validations_in_vain
        logger.info("resumed after step %d", progress.step)
        return progress.step

    def _report_attempt(self, checkpoints: Checkpoints, step: int) -> None:
        """Report that the run starts anew, and with how many ranks.

        torchrun's count is that of one node's failures: a change of the members does not add to
        it, and nodes may differ. The attempts of the run are counted beside its checkpoints.
        """
        attempt = checkpoints.begin_attempt(
            world_size=self.world.world_size, resumed_after=step, restarts=self.world.restarts
        )
        self.report.attempt(step, attempt, self.world.world_size, self.world.restarts)

    def _tokens_per_step(self) -> int:
        """Count the tokens of a step over all ranks; pipeline ranks share the same ones."""
        return sum(batch_sizes(self.settings, self.strategy)) * self.settings.context


def build_faults(settings: Settings) -> Injector:
    """Build this rank's faults; the environment names the rank, as no group is joined yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    plans = [parse_fault(text, world_size, settings.steps) for text in settings.fault]
    for plan in plans:
        plan.fault.check(settings, world_size)
        if settings.loader_workers and plan.fault.place in PLACES_OF_LOADING:
            problem = f"{plan.fault.name} acts where the rank loads its data, and it does not"
            raise SettingError("loader_workers", problem, "Set it to 0")
    return Injector(
        plans,
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size,
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        manifest=JsonLines(settings.fault_manifest),
    )


def build_data(
    settings: Settings, strategy: Strategy, faults: Injector
) -> tuple[Batches, Batches | None]:
    """Return the batches that this rank trains on, and those that it validates on, if any."""
    source, text = _read_data(settings)
    training, validation = split_text(text, settings.validation_ratio)
    windows = ByteWindows(training, settings.context, on_read=faults.visit_sample)
    checksums = [checksum(*window) for window in _all(training, settings)]
    if source is not None:
        windows = FileWindows(source, len(training), settings.context, faults.visit_sample)
    batch_size = batch_sizes(settings, strategy)
    training_batches = Batches(
        windows,
        batch_size=batch_size,
        shard=strategy.shard,
        num_shards=strategy.num_shards,
        seed=settings.seed,
        on_load=functools.partial(faults.visit, Place.DATA),
        on_worker_load=faults.visit_worker,
        num_workers=settings.loader_workers,
        checksums=checksums,
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


def _read_data(settings: Settings) -> tuple[DataSource | None, bytes]:
    """Return the text, and where its parts can be read again if it is not the library's."""
    if not settings.data_path:
        return None, read_standard_library(settings.data_bytes)
    return open_source(settings.data_path, settings.data_bytes, settings.data_wait_seconds)


def _all(text: bytes, settings: Settings) -> Iterator[Sample]:
    """Yield all windows, where their checksums are needed."""
    if settings.check_batches:
        windows = ByteWindows(text, settings.context)
        yield from (windows[index] for index in range(len(windows)))


def batch_sizes(settings: Settings, strategy: Strategy) -> list[int]:
    """Return the sequences that each shard draws in a step."""
    if not settings.global_batch:
        return [settings.batch_size * strategy.microbatches] * strategy.num_shards
    by_rank = settings.microbatches_by_rank(strategy.num_shards)
    return [settings.batch_size * microbatches for microbatches in by_rank]


def build_checkpoints(settings: Settings, world: World, strategy: Strategy) -> Checkpoints | None:
    """Return the checkpoints of the run as the ranks of a group write them, None without any."""
    if not settings.checkpoint_dir:
        return None
    shape = {name: getattr(settings, name) for name in RESUMED_WITH_THE_SAME}
    shape |= strategy.checkpoint_shape()
    return Checkpoints(
        settings.checkpoint_dir,
        keep=settings.checkpoint_keep,
        keep_best=settings.keep_best,
        world=world,
        shape=shape,
        is_elastic=STRATEGIES[settings.strategy].is_elastic,
    )
