"""What each stage of a layout holds: which parts of the model, cut by its tensor axis."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.planning.layout import Layout
from rankscope.planning.model import Model, Part


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline rank, all its chunks together. Amounts are of one rank."""

    index: int
    layers: int
    is_first: bool
    is_last: bool
    parameters: float
    forward_flops: float  # of one sample
    saved_bytes: float  # of one sample, with all that backward needs
    kept_bytes: float  # of one sample, where activations are computed again
    last_saved_bytes: float  # of one sample, of the last part, whose backward comes at once
    working_bytes: float  # of one sample, of the layer that is computed again
    largest_group: float  # weights of the largest part that is gathered at once


def stages_of(model: Model, layout: Layout) -> list[Stage]:
    """Return the stages whose load differs: layers are spread evenly, the first ones take the rest.

    At most four: the first, the last, and one of each size between them.
    """
    even, rest = divmod(model.num_layers, layout.pipeline)
    found: dict[tuple[int, bool, bool], Stage] = {}
    places = {0, 1, rest - 1, rest, layout.pipeline - 1}
    for index in sorted(place for place in places if 0 <= place < layout.pipeline):
        layers = even + (index < rest)
        key = (layers, index == 0, index == layout.pipeline - 1)
        if key not in found:
            found[key] = _stage(model, layout, index, *key)
    return list(found.values())


def num_alike(stage: Stage, model: Model, layout: Layout) -> int:
    """Return how many stages are like this one."""
    even, rest = divmod(model.num_layers, layout.pipeline)
    if stage.is_first or stage.is_last:
        return 1
    size = rest if stage.layers > even else layout.pipeline - rest
    ends = {0: even + (rest > 0), layout.pipeline - 1: even}
    return size - sum(layers == stage.layers for layers in ends.values())


def _stage(
    model: Model, layout: Layout, index: int, layers: int, is_first: bool, is_last: bool
) -> Stage:
    inside = [model.layer] * layers
    ends = [model.first] * is_first + [model.last] * is_last
    tied = model.tied_parameters if is_first and is_last else 0.0
    parts = [*inside, *ends]
    saved = [_saved(part, layout) for part in parts]
    last = saved[-1] if is_last else 0.0
    outside = sum(part.parameters for part in ends) - tied
    return Stage(
        index=index,
        layers=layers,
        is_first=is_first,
        is_last=is_last,
        parameters=(sum(part.parameters for part in parts) - tied) / layout.tensor,
        forward_flops=sum(part.forward_flops for part in parts) / layout.tensor,
        saved_bytes=sum(saved) - last,
        kept_bytes=layers * _stream(model.layer, layout) + sum(saved[layers:]) - last,
        last_saved_bytes=last,
        working_bytes=saved[0],
        largest_group=max(model.layer.parameters, outside) / layout.tensor,
    )


def _saved(part: Part, layout: Layout) -> float:
    whole = part.whole_saved_bytes / (layout.tensor if layout.sequence_parallel else 1)
    return whole + part.saved_bytes / layout.tensor


def _stream(part: Part, layout: Layout) -> float:
    return part.output_bytes / (layout.tensor if layout.sequence_parallel else 1)
