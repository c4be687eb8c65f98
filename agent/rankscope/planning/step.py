"""How long a step of a layout takes, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.planning.layout import Layout
from rankscope.planning.machine import Link, Machine
from rankscope.planning.model import OPTIMIZER_BYTES, Model
from rankscope.planning.stages import Stage, num_alike, stages_of
from rankscope.planning.traffic import Messages, border_bytes, messages_of
from rankscope.wire.formulas import ring_seconds, tree_seconds

BACKWARD = 2.0  # forwards: a gradient for the input, and one for the weights
# Of the idle time of 1F1B that is left where backward is cut in two halves of a forward's time
# each, (p-1)(F + B - W) and (p-1)(F + B - 2W) of (p-1)(F + B + W): Qi et al. 2024,
# arXiv 2401.10241, table 1.
_IDLE_SHARE = {"zero_bubble": 1 / 3, "zero_bubble_v": 0.0, "pipedream": 0.0}
OVERLAP_LOW = 0.5  # of what could be hidden behind computation, in the worse bound


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step. Messages are what computation does not cover; `update` 0: not known."""

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    data: float
    update: float

    @property
    def total(self) -> float:
        """Return the whole step."""
        return self.compute + self.bubble + self.exposed + self.update

    @property
    def exposed(self) -> float:
        """Return the messages that the step waits for."""
        return self.tensor + self.pipeline + self.data


@dataclass(frozen=True, slots=True)
class _Pass:
    """One microbatch in one stage, seconds."""

    forward: float
    backward: float
    tensor: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.tensor


def step_time(
    model: Model,
    layout: Layout,
    machine: Machine,
    optimizer: str,
    *,
    flops: float = 0.0,
    overlap: float = 1.0,
) -> StepTime | None:
    """Return the time of a step at so many FLOPs a second of each device (else the machine's).

    None where the rate of the devices, or of a link that is used, is not known.
    """
    rate = flops or machine.flops
    stages = stages_of(model, layout)
    sent = [messages_of(model, layout, stage) for stage in stages]
    if not rate or any(_link_of(m, layout, machine) is None for each in sent for m in each):
        return None
    passes = [
        _pass(layout, machine, stage, messages, rate)
        for stage, messages in zip(stages, sent, strict=True)
    ]
    slowest = max(range(len(stages)), key=lambda place: passes[place].total)
    busy = passes[slowest]
    around = sum(
        num_alike(stage, model, layout) * each.total
        for stage, each in zip(stages, passes, strict=True)
    )
    idle = _IDLE_SHARE.get(layout.schedule, 1.0) / layout.chunks
    return StepTime(
        compute=layout.microbatches * (busy.forward + busy.backward),
        bubble=max(0.0, around - busy.total) * idle if layout.pipeline > 1 else 0.0,
        tensor=layout.microbatches * busy.tensor,
        pipeline=_borders_seconds(model, layout, machine),
        data=max(
            _data_seconds(model, layout, machine, *of_stage, overlap)
            for of_stage in zip(stages, sent, passes, strict=True)
        ),
        update=_update_seconds(model, layout, machine, optimizer, stages),
    )


def bubble_share(time: StepTime) -> float:
    """Return the idle share of a step."""
    return time.bubble / time.total


def _pass(
    layout: Layout, machine: Machine, stage: Stage, sent: Sequence[Messages], rate: float
) -> _Pass:
    forward = layout.samples * stage.forward_flops / rate
    forward += stage.layers * machine.host_layer_seconds
    tensor = sum(_seconds(m, layout, machine) for m in sent if m.axis == "tensor")
    again = forward if layout.recomputes else 0.0
    return _Pass(forward, BACKWARD * forward + again, tensor / layout.microbatches)


def _link_of(messages: Messages, layout: Layout, machine: Machine) -> Link | None:
    if messages.axis == "tensor":
        return machine.link_of(layout.tensor, 1)
    if messages.axis == "pipeline":
        return machine.border(layout.tensor * layout.data)
    if messages.axis == "servers":
        return machine.border(1 if machine.nodes == 1 else machine.devices)
    if messages.axis == "copies":
        return machine.link_of(layout.replicas, layout.tensor * layout.shards)
    members = layout.shards if layout.shard == 3 else layout.data
    return machine.link_of(members, layout.tensor)


def _seconds(messages: Messages, layout: Layout, machine: Machine) -> float:
    """Return how long all of these messages take, one after the other."""
    link = _link_of(messages, layout, machine)
    assert link is not None
    rate, latency = link.bytes_per_second, link.latency_seconds
    size, members = messages.size_bytes, messages.members
    each = ring_seconds(messages.operation, size, members, rate, latency)
    if messages.operation == "all_reduce":
        each = min(each, tree_seconds(size, members, rate, latency))
    if messages.axis == "tensor":
        each = max(each, machine.least_message_seconds)
    return messages.count * each


def _borders_seconds(model: Model, layout: Layout, machine: Machine) -> float:
    """Return for how long stages wait for messages from each other.

    In GPipe a stage sends while it computes the next microbatch, so only the way of the first one
    through all stages counts, and back. In the others a stage sends and receives between two
    computations.
    """
    if layout.pipeline == 1:
        return 0.0
    link = machine.border(layout.tensor * layout.data)
    assert link is not None
    size = layout.samples * border_bytes(model, layout)
    one = ring_seconds("send", size, 2, link.bytes_per_second, link.latency_seconds)
    crossings = layout.pipeline - 1
    if layout.schedule == "pipedream":
        crossings = layout.microbatches
    elif layout.schedule != "gpipe":
        crossings += layout.chunks * layout.microbatches
    return 2 * crossings * one


def _data_seconds(
    model: Model,
    layout: Layout,
    machine: Machine,
    stage: Stage,
    sent: Sequence[Messages],
    one: _Pass,
    overlap: float,
) -> float:
    """Return how long the data axis is waited for, behind what computation covers."""
    own = [m for m in sent if m.axis in ("data", "copies", "servers")]
    if not own:
        return 0.0
    if layout.servers:
        return _servers_seconds(own, layout, machine)
    took = {(m.axis, m.operation): _seconds(m, layout, machine) for m in own}
    if not layout.overlaps:
        return sum(took.values())
    gathers = took.pop(("data", "all_gather"), 0.0)
    reductions = sum(took.values())
    times = layout.microbatches if layout.shard >= 2 and layout.reduces_each else 1
    buckets = max(m.count for m in own if m.operation != "all_gather") / times
    last = reductions / times / max(buckets, 1.0)  # after the last backward nothing covers it
    if layout.shard != 3:  # weights are gathered after the update, before the next forward
        return times * _uncovered(reductions / times, one.backward, last, overlap) + gathers
    if layout.keeps_weights:
        return gathers + _uncovered(reductions, one.backward, last, overlap)
    each = gathers / layout.microbatches / 2  # of one pass, forward or backward
    first = each / buckets
    forward = _uncovered(each, one.forward, first, overlap)
    scatter = reductions / times
    with_scatter = _uncovered(each + scatter, one.backward, first + last, overlap)
    alone = _uncovered(each, one.backward, first, overlap)
    return layout.microbatches * (forward + alone) + times * (with_scatter - alone)


def _uncovered(took: float, computing: float, least: float, overlap: float) -> float:
    """Return what is left of messages behind computation that runs beside them."""
    return max(min(least, took), took - overlap * computing)


def _servers_seconds(own: Sequence[Messages], layout: Layout, machine: Machine) -> float:
    """Return the way of all gradients to the servers and of the weights back.

    A server has one link for all workers, a worker one for all servers: the fuller one decides.
    """
    link = _link_of(own[0], layout, machine)
    assert link is not None
    piece = own[0].size_bytes
    at_once = max(layout.data, layout.servers)
    one_way = at_once * (link.latency_seconds + piece / link.bytes_per_second)
    return 2 * one_way


def _update_seconds(
    model: Model, layout: Layout, machine: Machine, optimizer: str, stages: Sequence[Stage]
) -> float:
    """Return how long the optimizer takes: it reads and writes all that it keeps, once."""
    if not machine.memory_bytes_per_second:
        return 0.0
    item, master = model.precision.item_bytes, model.precision.master_bytes
    each = 2 * item + 2 * (master + OPTIMIZER_BYTES[optimizer]) + (0 if master else item)
    parameters = max(stage.parameters for stage in stages)
    own = parameters / (layout.shards if layout.shard else max(layout.servers, 1))
    return own * each / machine.memory_bytes_per_second


def microbatches_for(stages: int, share: float, chunks: int = 1) -> int:
    """Return the least number of microbatches with which a pipeline idles at most so much."""
    return math.ceil(round((stages - 1) * (1 - share) / share / chunks, 6))
