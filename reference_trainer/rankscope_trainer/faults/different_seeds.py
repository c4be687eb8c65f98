"""A rank that starts from another seed, as when a launcher adds the rank to it on one side only."""

import dataclasses
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class DifferentSeeds(Fault):
    """The rank draws its first weights, its order of the data and its dropout from another seed.

    What that does depends on the strategy. DDP sends rank 0's weights to all, which hides the
    first difference; what remains is that ranks share out different orders of the data, so some
    windows of an epoch are trained twice and others never. Stages of a pipeline each draw the
    batch for themselves: inputs and targets then belong to different text, and nothing is learnt.
    """

    name: ClassVar[str] = "different_seeds"
    finding: ClassVar[str] = "drift"
    place: ClassVar[Place] = Place.START
    default_size: ClassVar[Magnitude | None] = Magnitude(count=1.0)
    size_is: ClassVar[str] = "added to the seed"

    def fire(self, context: FaultContext) -> None:
        """Build this rank with another seed than the settings say."""
        assert context.settings is not None
        seed = context.settings.seed + int(context.size())
        context.settings = dataclasses.replace(context.settings, seed=seed)
