"""Numbers of training that can be seen without a change to the script, one file per source.

None of them draws random numbers, changes the graph, keeps a tensor beyond its step or waits for
a device; `rankscope.wire.metric_names` lists what they record.
"""

from rankscope.rank.hooks.numbers.batches import Batches
from rankscope.rank.hooks.numbers.gradients import Clipping, Gradients
from rankscope.rank.hooks.numbers.logged import LightningLoss, OldLightningLoss, TrainerLoss
from rankscope.rank.hooks.numbers.loss import Losses
from rankscope.rank.hooks.numbers.model import LearningRate, ModelSize
from rankscope.rank.hooks.numbers.replicas import Replicas

__all__ = [
    "Batches",
    "Clipping",
    "Gradients",
    "LearningRate",
    "LightningLoss",
    "Losses",
    "ModelSize",
    "OldLightningLoss",
    "Replicas",
    "TrainerLoss",
]
