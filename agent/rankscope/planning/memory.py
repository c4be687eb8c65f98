"""What the fullest rank of a layout holds, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.planning.layout import Layout
from rankscope.planning.machine import Machine
from rankscope.planning.model import OPTIMIZER_BYTES, Model
from rankscope.planning.stages import Stage, stages_of
from rankscope.planning.traffic import bucket_bytes

GATHERED_AT_ONCE = 2  # groups of cut weights: the one in use, and the next one on its way
REDUCED_AT_ONCE = 2  # buckets of cut gradients: one is filled while one is sent


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. `margin` is what libraries and gaps between blocks take."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buckets: float
    margin: float

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buckets + self.margin


def memory_of(model: Model, layout: Layout, machine: Machine, optimizer: str) -> Memory:
    """Return the memory of the rank that needs most: of the first stage, or of the last."""
    of_stages = (
        _memory(model, layout, machine, optimizer, stage) for stage in stages_of(model, layout)
    )
    return max(of_stages, key=lambda memory: memory.total)


def states_bytes(model: Model, layout: Layout, optimizer: str, parameters: float) -> list[float]:
    """Return the bytes of weights, gradients and optimizer state of so many weights.

    ZeRO cuts the last, the last two, or all three over data ranks (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 5). With hand-made mixed precision they are 2, 2 and 12 bytes.
    """
    precision = model.precision
    each = [precision.item_bytes, precision.item_bytes]
    each.append(precision.master_bytes + OPTIMIZER_BYTES[optimizer])
    return [
        parameters * size / (layout.shards if layout.shard >= level else 1)
        for size, level in zip(each, (3, 2, 1), strict=True)
    ]


def _memory(model: Model, layout: Layout, machine: Machine, optimizer: str, stage: Stage) -> Memory:
    weights, gradients, state = states_bytes(model, layout, optimizer, stage.parameters)
    if layout.shard >= 2 and not layout.reduces_each:
        gradients += stage.parameters * model.precision.item_bytes  # whole until the last one
    gradients *= 1 + layout.gradient_copies
    if layout.schedule == "pipedream":  # a version for each microbatch in flight
        weights *= layout.pipeline - stage.index
    parts = (weights, gradients, state, _activations(layout, stage), _buckets(model, layout, stage))
    margin = machine.reserved_bytes + machine.fragmentation * sum(parts)
    return Memory(*parts, margin)


def _activations(layout: Layout, stage: Stage) -> float:
    """Return what forwards keep for backwards that have not run yet."""
    in_flight = microbatches_in_flight(layout, stage.index)
    if layout.recomputes:
        return layout.samples * (in_flight * stage.kept_bytes + stage.working_bytes)
    return layout.samples * in_flight * stage.saved_bytes


def microbatches_in_flight(layout: Layout, index: int) -> float:
    """Return how many microbatches' activations a stage holds at once.

    GPipe: all. 1F1B and ZB-H1: as many as there are stages from here on (arXiv 2104.04473, section
    2.2.1). Interleaved with v chunks: 1 + (p-1)/(p v) times those of p (arXiv 2205.05198, 4.2.3).
    """
    stages, microbatches = layout.pipeline, layout.microbatches
    if stages == 1:
        return 1
    if layout.schedule == "gpipe":
        return microbatches
    if layout.schedule == "pipedream":
        return stages - index
    if layout.chunks > 1 or layout.schedule == "zero_bubble_v":
        chunks = max(layout.chunks, 2)
        warm_up = stages * (1 + (stages - 1) / (stages * chunks))
        return min(microbatches, warm_up)
    return min(microbatches, stages - index)


def _buckets(model: Model, layout: Layout, stage: Stage) -> float:
    """Return the buffers of messages: gradients on their way, and weights that were gathered."""
    item = model.precision.item_bytes
    whole = stage.parameters * item
    if layout.shard == 3:
        gathered = whole if layout.keeps_weights else GATHERED_AT_ONCE * stage.largest_group * item
        return gathered + stage.largest_group * item  # and the gradient of the group in backward
    if layout.shard or layout.servers:
        return min(whole, REDUCED_AT_ONCE * bucket_bytes(model, layout)) if layout.shard else whole
    is_reduced = layout.family in ("ddp", "tensor+data", "pipeline+data", "tensor+pipeline+data")
    return whole if is_reduced and layout.data > 1 and layout.has_bucket_copies else 0.0
