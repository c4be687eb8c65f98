"""Training that a lost rank costs a step, and no checkpoint: the survivors make a group anew.

    rank 0   forward  backward ─┐        ┌ take back ─┐       ┌ the same step, with 3 parts
    rank 1   forward  backward ─┤ broken ┤ take back ─┼ meet ─┤ the same step, with 3 parts
    rank 2   forward  dies      ┘        │            │       │
    rank 3   forward  backward ─┘        └ take back ─┘       └ the same step, with 3 parts

A step is taken back by dropping its gradients and the position in the data: no weight changes
before all members have agreed to (`Places.vote`). The windows of the step are then dealt out to
those that are left, so none is lost and none is trained twice. A process that comes takes weights
and moments from the first one that is as far as any, in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rankscope
from rankscope.address import AddressError
from rankscope_trainer.checkpoint_folder import finished
from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.json_lines import JsonLines
from rankscope_trainer.regroup import NUM_PLACES
from rankscope_trainer.regroup.advice import Adviser
from rankscope_trainer.regroup.group import Group, is_lost_peer
from rankscope_trainer.regroup.places import Epoch, LeftOutError, Places
from rankscope_trainer.report import name_lines
from rankscope_trainer.settings import Settings
from rankscope_trainer.stopping import Stopping
from rankscope_trainer.train import Trainer, build_checkpoints, build_data, prepare
from rankscope_trainer.world import World, choose_device

STORE, PROCESS = "RANKSCOPE_TRAINER_STORE", "RANKSCOPE_TRAINER_PROCESS"
_LOOK_FOR_PLACE_SECONDS = 0.2

logger = logging.getLogger("rankscope_trainer")


class TakenBackError(RuntimeError):
    """The members are agreed not to update in this step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How far training is for good."""

    step: int = 0
    position: int = 0  # windows that all ranks together have drawn


def train_in_groups(settings: Settings, stopping: Stopping) -> None:
    """Take a place, or wait for one, and train to the last step in one group after the other."""
    address = os.environ.get(STORE)
    if address is None:
        problem = "a launcher that ends all ranks where one dies leaves none to train on"
        raise SettingError("regroup", problem, "Start with `python -m rankscope_trainer.regroup`")
    settings, faults = prepare(settings)
    GroupTrainer(settings, address, faults, stopping).run()


class GroupTrainer(Trainer):
    """A trainer whose group changes."""

    def __init__(
        self, settings: Settings, address: str, faults: Injector, stopping: Stopping
    ) -> None:
        """Build all that needs no group; `address` is that of the launcher's store."""
        self._num_places = int(os.environ[NUM_PLACES])
        rank = os.environ.get("RANK")
        device = choose_device(settings.device, int(os.environ.get("LOCAL_RANK", "0")))
        self._settings_losses = settings.losses
        quiet = dataclasses.replace(settings, losses="")  # until it is known who writes them
        super().__init__(quiet, World(int(rank or 0), self._num_places, device), faults, stopping)
        self._place = None if rank is None else int(rank)
        self._store = _connect(address, settings.timeout_seconds)
        self._places = Places(
            self._store,
            os.environ[PROCESS],
            num_places=self._num_places,
            patience_seconds=settings.regroup_seconds,
        )
        watching = Places(
            _connect(address, settings.timeout_seconds),
            os.environ[PROCESS],
            num_places=self._num_places,
            patience_seconds=settings.regroup_seconds,
        )
        self._is_broken = watching.is_broken
        self._group = Group(
            self._store,
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout_seconds=settings.regroup_seconds,
        )
        self._samples = JsonLines(settings.samples)
        self._adviser = _adviser(settings)
        self._trained = Trained()
        self._is_to_regroup = False

    def run(self) -> int:
        """Train to the last step; return 0."""
        with (
            contextlib.closing(self.strategy),
            contextlib.closing(self.report),
            contextlib.closing(self.times),
            contextlib.closing(self.faults),
            contextlib.closing(self._adviser) if self._adviser else contextlib.nullcontext(),
        ):
            rank = self._wait_for_place() if self._place is None else self._place
            if rank is None:
                logger.info("training is over, no place became free")
                return 0
            try:
                self._places.take(rank)
                self._train_as(rank)
            except LeftOutError as reason:
                logger.warning("after step %d: %s, this process ends", self._trained.step, reason)
        return 0

    def _train_as(self, rank: int) -> None:
        """Meet, train and part until the last step is trained."""
        while self._trained.step < self.settings.steps:
            began, is_broken = time.monotonic(), True
            try:
                epoch = self._places.form(rank, self._trained.step)
                if epoch is None:
                    return
                self._join(epoch, rank)
                logger.info(
                    "group %d after step %d: ranks %s, made in %.2f s",
                    epoch.number, self._trained.step, epoch.ranks, time.monotonic() - began,
                )  # fmt: skip
                self._train_together()
                is_broken = False
            except RuntimeError as error:
                if not isinstance(error, TakenBackError) and not is_lost_peer(error):
                    raise
                self._take_back(error)
            finally:
                self._group.leave(is_broken=is_broken)
        self._places.say_over()

    def _wait_for_place(self) -> int | None:
        """Return a place that has become free and is ours now, None once training is over."""
        name_lines("standby")
        logger.info("ready")
        while not self._places.is_over:
            rank = self._places.take_vacant()
            if rank is not None:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self._num_places), "LOCAL_WORLD_SIZE": str(self._num_places),
                }  # fmt: skip
                name_lines(f"rank {rank}")
                logger.info("takes the place of the process that was this rank")
                torch.manual_seed(self.settings.seed + rank)
                return rank
            time.sleep(_LOOK_FOR_PLACE_SECONDS)
        return None

    # --- a group -------------------------------------------------------------------------

    def _join(self, epoch: Epoch, rank: int) -> None:
        """Make the group of an epoch, be as far as all, and share the data anew."""
        position = epoch.ranks.index(rank)
        self.world = World(position, len(epoch.members), self.world.device)
        rankscope.regrouped(epoch.number, epoch.ranks, rank=rank, world_size=self._num_places)
        self._group.make(epoch.number, position, len(epoch.members), self._is_broken)
        self.checkpoints = build_checkpoints(self.settings, self.world, self.strategy)
        is_current = self._trained.step == epoch.members[epoch.source].step
        if not epoch.is_level:
            self._share_state(epoch)
        self.strategy.regroup(self.world, is_untrained=epoch.is_untrained, is_current=is_current)
        self._group.widen()
        if epoch.is_untrained:
            self._resume_alone()
        self.faults.microbatches = self.strategy.microbatches
        self.batches, self.validation_batches = build_data(
            self.settings, self.strategy, self.faults
        )
        self.batches.position = self._trained.position
        is_for_job = self.strategy.writes_losses
        losses = self._settings_losses if is_for_job else ""
        self.report.regrouped(self._tokens_per_step(), losses, is_for_job=is_for_job)
        rankscope.set_step(self._trained.step + 1)

    def _resume_alone(self) -> None:
        """Read the newest checkpoint, as all members do where none has trained yet."""
        if self.checkpoints is None or not self.settings.resume:
            return
        if self.world.rank == 0:
            self.checkpoints.remove_unfinished()
        for newest in finished(Path(self.settings.checkpoint_dir))[-1:]:
            step = int(newest.name.removeprefix("step-"))
            progress = self.checkpoints.load(step, self.strategy, part=0)
            self._trained = Trained(step=progress.step, position=progress.position)
            logger.info("resumed after step %d", progress.step)

    def _share_state(self, epoch: Epoch) -> None:
        """Send weights, moments and position from a member that is ahead to those behind.

        Where the model is held in parts, `Strategy.regroup` sends these.
        """
        source = epoch.source
        is_source = self.world.rank == source
        packed = _pack(self._state()) if is_source else b""
        size = torch.tensor(len(packed), device=self.world.device)
        dist.broadcast(size, src=source)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.world.device)
        if is_source:
            data.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        dist.broadcast(data, src=source)
        if self._trained.step == epoch.members[source].step:
            return
        state = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)
        if self.strategy.is_replicated:
            self.strategy.model.load_state_dict(state["model"])
            self.strategy.optimizer.load_state_dict(state["optimizer"])
        self._trained = Trained(step=state["step"], position=state["position"])
        ahead = epoch.members[source].rank
        logger.info("took over after step %d, from rank %d", self._trained.step, ahead)

    def _state(self) -> dict[str, Any]:
        if not self.strategy.is_replicated:
            return dataclasses.asdict(self._trained)
        return {
            "model": self.strategy.model.state_dict(),
            "optimizer": self.strategy.optimizer.state_dict(),
            **dataclasses.asdict(self._trained),
        }

    # --- steps ---------------------------------------------------------------------------

    def _train_together(self) -> None:
        """Train until a process is to be let in or left out, or to the last step."""
        self._is_to_regroup, self._saved = False, self._trained.step
        supply = self._build_supply()
        while self._trained.step < self.settings.steps and not self._is_to_regroup:
            self._advance(self._trained.step + 1, supply)
            if self._adviser is not None and self.world.rank == 0:
                self._heed(self._adviser)

    def _heed(self, adviser: Adviser) -> None:
        """Look whether ranks are to be left out; the first member of a group does."""
        adviser.begin()
        advice = adviser.newest()
        if advice is None:
            return
        present = self._places.epoch.ranks
        ranks = sorted(set(advice.ranks) & set(present))
        if not self.settings.obey_advice:
            logger.warning("advice %d: would leave out ranks %s", advice.epoch, ranks)
            adviser.report(advice.epoch, "ignored", "a dry run")
        elif not ranks or len(ranks) * 2 >= len(present):
            logger.warning("advice %d is refused: ranks %s of %s", advice.epoch, ranks, present)
            adviser.report(advice.epoch, "refused", f"ranks {ranks} of {present}")
        else:
            logger.warning("advice %d: leaves out ranks %s: %s", advice.epoch, ranks, advice.why)
            for rank in ranks:
                self._places.leave_out(rank)
            adviser.report(advice.epoch, "done", f"trains on without ranks {ranks}")

    def _agree_to_update(self, step: int, loss: Tensor | None) -> None:
        """Raise TakenBackError if any member could not finish the step."""
        facts = {
            "step": step, "epoch": self._places.epoch.number, "rank": self._rank,
            "pid": os.getpid(),
        }  # fmt: skip
        known_loss = None if loss is None else float(loss).hex()
        self._samples.write(**facts, windows=self.batches.windows, loss=known_loss)
        decision = self._places.vote(step)
        self._samples.write(**facts, decision=decision)
        if decision == "abort":
            raise TakenBackError("another member did not finish the step")
        self._is_to_regroup = decision == "train, then regroup"
        self._trained = Trained(step=step, position=self.batches.position)

    @property
    def _rank(self) -> int:
        return self._places.epoch.ranks[self.world.rank]

    def _take_back(self, error: RuntimeError) -> None:
        """Be as before the step in progress, and have all others be so too."""
        step = self._trained.step + 1
        why = re.sub(r"^\[[^\]]*\] ", "", str(error)).splitlines()[0].partition(". ")[0]
        logger.warning("step %d is taken back: %s", step, why)
        if not self._places.abort(step):
            raise RuntimeError(f"step {step} was trained by the others") from error
        self.strategy.optimizer.zero_grad(set_to_none=True)


def _adviser(settings: Settings) -> Adviser | None:
    if not settings.ask_advice:
        return None
    try:
        return Adviser(os.environ)
    except (KeyError, AddressError) as error:
        problem = f"no server is known: {error}"
        raise SettingError("ask_advice", problem, "Start under `rankscope run --server`") from error


def _connect(address: str, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
    host, _, port = address.rpartition(":")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def _pack(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
