"""Faults on the way from the disk to the model: data that is slow to load, or damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import DelayFault, Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class SlowData(DelayFault):  # a slow disk, or a busy loader
    """Each batch of the rank takes longer to load."""

    name = "slow_data"
    finding = "slow_data"
    place = Place.DATA
    default_size = Magnitude(ratio=1.0)
    size_is = "extra time of a step"


class SlowEpochStart(DelayFault):  # a loader that starts anew, without `persistent_workers`
    """The first batch of each epoch takes the rank longer to load."""

    name = "slow_epoch_start"
    finding = "slow_epoch_start"
    place = Place.DATA
    default_size = Magnitude(seconds=1.0)
    size_is = "extra time of an epoch"

    def is_due(self, context: FaultContext) -> bool:
        """Only while the first batch of an epoch is put together."""
        return context.parts().batches.is_at_epoch_start


class BadShard(DelayFault):  # a part of the data is on a slow disk
    """The first eighth of the data takes the rank longer to read, wherever it is drawn."""

    name = "bad_shard"
    finding = "bad_shard"
    place = Place.SAMPLE
    default_size = Magnitude(seconds=0.02)
    size_is = "extra time of a window"
    shards = 8

    def is_due(self, context: FaultContext) -> bool:
        """Only while a window of the bad shard is read."""
        return context.sample * self.shards < context.parts().batches.num_windows

    def fire(self, context: FaultContext) -> None:
        """Sleep, and add up for how long."""
        context.add(slow_seconds=context.delay_seconds())
        super().fire(context)


class ForgottenSampler(Fault):  # a DataLoader without a DistributedSampler
    """Every rank draws the first rank's part of the data, so that all train on the same samples."""

    name = "forgotten_sampler"
    finding = "same_samples"
    place = Place.STEP
    on_all_ranks = True

    def check(self, settings: Settings, world_size: int) -> None:
        """Only replicas each have samples of their own."""
        if settings.strategy != "ddp" or world_size < 2:
            problem = "forgotten_sampler needs ranks that share the data of one model"
            raise SettingError("fault", problem, "Choose strategy ddp, and two ranks or more")

    def fire(self, context: FaultContext) -> None:
        """Be the replicas that are dealt to first."""
        for rank, sampler in enumerate(context.parts().batches.slices.samplers):
            sampler.rank = rank


class ForgottenSetEpoch(Fault):  # a DistributedSampler shuffles by its epoch alone
    """The sampler is not given the number of the epoch: each epoch has the order of the first."""

    name = "forgotten_set_epoch"
    finding = "same_order"
    place = Place.STEP
    on_all_ranks = True

    def begin(self, context: FaultContext) -> None:
        """Leave the sampler at the epoch in which it is."""
        for sampler in context.parts().batches.slices.samplers:
            vars(sampler)["set_epoch"] = lambda epoch: None

    def end(self, context: FaultContext) -> None:
        """Let it shuffle again."""
        for sampler in context.parts().batches.slices.samplers:
            del vars(sampler)["set_epoch"]


class CorruptBatch(Fault):
    """So many bytes of the rank's batch are changed after it was drawn, once in each step."""

    name = "corrupt_batch"
    finding = "corrupt_batch"
    place = Place.BATCH
    default_size = Magnitude(count=8)
    size_is = "bytes of a batch"
    mask = 0x55  # every second bit of a byte

    _last_step = 0

    def is_due(self, context: FaultContext) -> bool:
        """Spare the batch drawn in place of a skipped one, and ranks that draw no bytes at all."""
        has_bytes = context.batch is not None and context.batch[0].numel() > 0
        return has_bytes and context.step != self._last_step

    def fire(self, context: FaultContext) -> None:
        """Flip half of the bits of the first bytes."""
        assert context.batch is not None
        self._last_step = context.step
        bytes_BT, _ = context.batch
        first = bytes_BT.view(-1)[: int(context.size())]
        first ^= self.mask
        context.add(changed_bytes=len(first))
