"""Faults in how a run is laid out: uneven stages, few microbatches, a hot shard, another seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import FaultContext, Magnitude, SettingsFault
from rankscope_trainer.strategies import STRATEGIES
from rankscope_trainer.strategies.stages.placement import num_stages

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class UnevenStages(SettingsFault):
    """The first stage holds so many layers more than the others, which wait for it."""

    name = "uneven_stages"
    finding = "stage_imbalance"
    default_size = Magnitude(count=2)
    size_is = "layers taken from others"
    strategies = ("pipeline", "model_parallel")

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Take layers away from the stages that have most, until the first has so many more."""
        stages = num_stages(settings, context.world_size)
        even, rest = divmod(settings.layers, stages)
        sizes = [even + (stage < rest) for stage in range(stages)]
        for _ in range(int(context.size())):
            giver = max(range(1, stages), key=sizes.__getitem__, default=0)
            if sizes[giver] < 2:
                problem = f"{settings.layers} layers on {stages} stages cannot be that uneven"
                raise SettingError("fault", problem, "Give more layers, or a smaller size")
            sizes[giver] -= 1
            sizes[0] += 1
        stage_layers = ",".join(map(str, sizes))
        context.note(stage_layers=stage_layers)
        return {"stage_layers": stage_layers}


class FewMicrobatches(SettingsFault):
    """The same batch is cut into fewer, larger microbatches, so that stages wait for each other."""

    name = "few_microbatches"
    finding = "pipeline_bubble"
    default_size = Magnitude(count=2)
    size_is = "microbatches of a step"
    strategies = ("pipeline",)

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Change the cut, and keep the batch."""
        before, after = settings.microbatches_for(context.world_size), int(context.size())
        sequences = settings.batch_size * before
        if sequences % after or after >= before:
            problem = f"{before} microbatches of {settings.batch_size} cannot become {after}"
            raise SettingError("fault", problem, "Give a size that is smaller and divides them")
        return {"microbatches": after, "batch_size": sequences // after}

    def fire(self, context: FaultContext) -> None:
        """Change the settings, unless the schedule needs more microbatches."""
        super().fire(context)
        assert context.settings is not None
        STRATEGIES[context.settings.strategy].check(context.settings, context.world_size)


class StaleWeights(SettingsFault):
    """No stage keeps the weights of microbatches in flight: backwards use newer ones."""

    name = "stale_weights"
    finding = "staleness"
    strategies = ("pipedream",)

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Turn weight stashing off."""
        return {"weight_stashing": False}


class HotShard(SettingsFault):
    """The first server holds so many times the weights of each other one, and their traffic."""

    name = "hot_shard"
    finding = "hot_shard"
    default_size = Magnitude(count=8)
    size_is = "times another's weights"

    def check(self, settings: Settings, world_size: int) -> None:
        """One shard can only be hotter than another."""
        if settings.strategy != "parameter_server" or settings.servers < 2:
            problem = "hot_shard needs strategy parameter_server with several servers"
            raise SettingError("fault", problem, "Choose it, and servers = 2 or more")

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Deal the weights unevenly."""
        shares = [context.size()] + [1.0] * (settings.servers - 1)
        return {"server_shares": ",".join(f"{share:g}" for share in shares)}


class DifferentSeeds(SettingsFault):  # a launcher that adds the rank to the seed on one side only
    """The rank draws its first weights, its order of the data and its dropout from another seed.

    What that does depends on the strategy. DDP sends rank 0's weights to all, which hides the
    first difference; what remains is that ranks share out different orders of the data, so some
    windows of an epoch are trained twice and others never. Stages of a pipeline each draw the
    batch for themselves: inputs and targets then belong to different text, and nothing is learnt.
    """

    name = "different_seeds"
    finding = "drift"
    default_size = Magnitude(count=1.0)
    size_is = "added to the seed"
    on_all_ranks = False

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Build this rank with another seed than the settings say."""
        return {"seed": settings.seed + int(context.size())}
