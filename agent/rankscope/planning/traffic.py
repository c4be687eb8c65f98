"""The messages of a step: what a rank sends on which axis, how often, and how much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.planning.layout import Layout
from rankscope.planning.model import Model
from rankscope.planning.stages import Stage
from rankscope.wire.formulas import bus_factor


@dataclass(frozen=True, slots=True)
class Messages:
    """Equal messages of one rank in a step. `size_bytes` is that of the whole tensor."""

    axis: str
    operation: str
    count: float
    size_bytes: float
    members: int

    @property
    def sent_bytes(self) -> float:
        """Return what the rank sends in a step: in a ring 2 (n-1)/n of the size, or half of it."""
        return self.count * self.size_bytes * (bus_factor(self.operation, self.members) or 0.0)


def messages_of(model: Model, layout: Layout, stage: Stage) -> list[Messages]:
    """Return the messages of a rank of this stage in one step."""
    found = (*_tensor(model, layout, stage), *_pipeline(model, layout, stage))
    return [*found, *_data(model, layout, stage)]


def _tensor(model: Model, layout: Layout, stage: Stage) -> Iterator[Messages]:
    """Two sums for each layer in forward, two in backward (arXiv 1909.08053, section 3).

    A sum by position parts is a reduce_scatter and an all_gather (arXiv 2205.05198, section 4.2.2).
    """
    if layout.tensor == 1:
        return
    size = layout.samples * model.layer.output_bytes
    count = layout.microbatches * (stage.layers * sums_of_layer(layout) + stage.is_last)
    names = ("reduce_scatter", "all_gather") if layout.sequence_parallel else ("all_reduce",)
    for name in names:
        yield Messages("tensor", name, count, size, layout.tensor)


def sums_of_layer(layout: Layout) -> int:
    """Return how often the residual stream is summed over the tensor axis, in a layer."""
    return 6 if layout.recomputes else 4


def _pipeline(model: Model, layout: Layout, stage: Stage) -> Iterator[Messages]:
    """An activation over each border, and a gradient back."""
    if layout.pipeline == 1:
        return
    size = layout.samples * border_bytes(model, layout)
    # with v chunks the last rank also sends to the first, v-1 times
    borders = 2 * layout.chunks - (stage.is_first + stage.is_last) * (layout.chunks == 1)
    yield Messages("pipeline", "send", layout.microbatches * borders, size, 2)


def border_bytes(model: Model, layout: Layout) -> float:
    """Return what crosses a border, of one sample; with sequence parallel a rank has its part."""
    return model.layer.output_bytes / (layout.tensor if layout.sequence_parallel else 1)


def _data(model: Model, layout: Layout, stage: Stage) -> Iterator[Messages]:
    item = model.precision.item_bytes
    whole = stage.parameters * item
    if layout.servers:  # to each server its piece of the gradient; its weights come back
        size = whole / layout.servers
        yield Messages("servers", "send", layout.servers, size, layout.servers + 1)
        yield Messages("servers", "recv", layout.servers, size, layout.servers + 1)
        return
    if layout.data == 1 or layout.family == "hogwild":
        return
    if layout.shard == 3:
        yield from _cut_weights(layout, stage, whole)
        return
    buckets = max(1, math.ceil(whole / bucket_bytes(model, layout)))
    share = 1 / layout.average_every
    if layout.shard == 0:
        yield Messages("data", "all_reduce", buckets * share, whole / buckets, layout.data)
        return
    times = layout.microbatches if layout.shard == 2 and layout.reduces_each else 1
    yield Messages("data", "reduce_scatter", buckets * times, whole / buckets, layout.data)
    yield Messages("data", "all_gather", buckets, whole / buckets, layout.data)


def bucket_bytes(model: Model, layout: Layout) -> float:
    """Return how much is reduced at once.

    Where state is cut, implementations take larger buckets the more ranks there are, as a ring's
    hops would decide else: 40 M numbers, and 1 M for each rank (Megatron-Core,
    DistributedDataParallelConfig.bucket_size).
    """
    if layout.shard == 0:
        return layout.bucket_bytes
    return model.precision.item_bytes * max(40e6, 1e6 * layout.data)


def _cut_weights(layout: Layout, stage: Stage, whole: float) -> Iterator[Messages]:
    groups = stage.layers + 1  # what is outside of the layers is a group, too
    gathers = 1 if layout.keeps_weights else 2 * layout.microbatches
    scatters = layout.microbatches if layout.reduces_each else 1
    size = whole / groups
    if layout.shards > 1:
        yield Messages("data", "all_gather", groups * gathers, size, layout.shards)
        yield Messages("data", "reduce_scatter", groups * scatters, size, layout.shards)
    if layout.replicas > 1:
        part = size / layout.shards
        yield Messages("copies", "all_reduce", groups * scatters, part, layout.replicas)
