"""What the fullest rank of a layout holds, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankscope.planning.layout import Layout
from rankscope.planning.machine import Machine
from rankscope.planning.model import OPTIMIZER_BYTES, Model
from rankscope.planning.stages import Stage, stages_of
from rankscope.planning.traffic import border_bytes, bucket_bytes

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
    margin: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buckets + self.margin


def memory_of(model: Model, layout: Layout, machine: Machine, optimizer: str) -> Memory:
    """Return the memory of the rank that needs most: of the first stage, or of the last.

    With servers it is a worker's, or a server's where that needs more.
    """
    found = [_memory(model, layout, machine, optimizer, one) for one in stages_of(model, layout)]
    if layout.servers:
        found.append(_of_server(model, layout, machine, optimizer))
    return max(found, key=lambda memory: memory.total)


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
        gradients = stage.parameters * model.precision.item_bytes  # whole until the last one
    if layout.servers:
        state = 0.0
    if layout.schedule == "pipedream":  # a version for each microbatch in flight
        weights *= layout.pipeline - stage.index
    activations = _activations(layout, stage)
    after = _after_backward(model, layout, stage)
    buckets = _buckets(model, layout, stage) + max(0.0, after - activations)
    buckets += _received(model, layout, stage)
    return _with_margin(Memory(weights, gradients, state, activations, buckets), machine)


def _of_server(model: Model, layout: Layout, machine: Machine, optimizer: str) -> Memory:
    """Return what a server holds: its piece, the state for it, the gradients of all workers.

    As the reference trainer's server does it: they are there twice while they are added up, or
    once beside what an update of one large piece needs, twice its size.
    """
    piece = model.parameters / layout.servers
    weights, gradient, state = states_bytes(model, layout, optimizer, piece)
    buckets = max(2 * layout.data, layout.data + 2) * gradient
    return _with_margin(Memory(weights, gradient, state, 0.0, buckets), machine)


def _with_margin(memory: Memory, machine: Machine) -> Memory:
    return replace(memory, margin=machine.reserved_bytes + machine.fragmentation * memory.total)


def _activations(layout: Layout, stage: Stage) -> float:
    """Return what forwards keep for backwards that have not run yet."""
    in_flight = microbatches_in_flight(layout, stage.index)
    ends = stage.last_saved_bytes * (layout.microbatches if layout.schedule == "gpipe" else 1)
    if layout.recomputes:
        return layout.samples * (in_flight * stage.kept_bytes + stage.working_bytes + ends)
    return layout.samples * (in_flight * stage.saved_bytes + ends)


def microbatches_in_flight(layout: Layout, index: int) -> float:
    """Return how many microbatches' activations a stage holds at once.

    GPipe: all. 1F1B and ZB-H1: as many as there are stages from here on (arXiv 2104.04473, section
    2.2.1). Interleaved with v chunks, in chunks, 2 (p - i - 1) + (v - 1) p + 1 at stage i: the
    first one holds 1 + (p-1)/(p v) times what p microbatches are (arXiv 2205.05198, section 4.2.3).
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
        forwards = 2 * (stages - index - 1) + (chunks - 1) * stages + 1
        return min(microbatches, forwards / chunks)
    return min(microbatches, stages - index)


def _buckets(model: Model, layout: Layout, stage: Stage) -> float:
    """Return the buffers of messages: gradients on their way, and weights that were gathered."""
    item = model.precision.item_bytes
    whole = stage.parameters * item
    if layout.shard == 3:
        gathered = whole if layout.keeps_weights else GATHERED_AT_ONCE * stage.largest_group * item
        return gathered + stage.largest_group * item  # and the gradient of the group in backward
    if layout.shard:
        return min(whole, REDUCED_AT_ONCE * bucket_bytes(model, layout))
    return whole if layout.has_bucket_copies else 0.0


def _received(model: Model, layout: Layout, stage: Stage) -> float:
    """Return the buffers for what comes over borders: one for each microbatch, made beforehand.

    So does PyTorch (`PipelineStage._prepare_forward_infra`); where a microbatch is in flight its
    input is an activation already.
    """
    if layout.pipeline == 1 or not layout.has_receive_buffers:
        return 0.0
    forwards = layout.chunks - (stage.is_first and layout.chunks == 1)
    backwards = layout.chunks - (stage.is_last and layout.chunks == 1)
    in_flight = min(microbatches_in_flight(layout, stage.index), layout.microbatches)
    ready = (layout.microbatches - in_flight) * forwards + layout.microbatches * backwards
    return layout.samples * border_bytes(model, layout) * ready


def _after_backward(model: Model, layout: Layout, stage: Stage) -> float:
    """Return the buffers that are made once activations are gone: they take their place.

    A reduction by hand has the gradient once more, in one piece; a worker of servers that, and the
    weights that come back.
    """
    copies = 2 if layout.servers else layout.gradient_copies
    return copies * stage.parameters * model.precision.item_bytes
