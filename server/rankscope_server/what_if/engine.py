"""The planner, given what a run showed, so that it says of the layout now what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankscope.planning.layout import BUCKET_BYTES, Layout
from rankscope.planning.machine import Link, Machine
from rankscope.planning.memory import memory_of
from rankscope.planning.model import OPTIMIZER_BYTES, Model, Part, Precision
from rankscope.planning.step import StepTime, step_time
from rankscope_server.what_if.recorded import MeasuredLink, Recorded

SHARD = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
_NOTHING = Part(0.0, 0.0, 0.0, 0.0)
_WORK = 1.0  # FLOPs of one recorded microbatch: the rate is what makes a step as long as it was
_PASSES = 3.0  # a backward is two forwards
_HALVINGS = 12  # `shown` and `kept_ms` make up for the rest
_NEAR = 0.05


class CannotAnswer(Exception):
    """The run does not show what an answer needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The planner's inputs of one run, and what makes its answer that of the run.

    `overlap` is the share of a backward that hides messages, `shown` what was measured of the
    messages that it leaves, `idle` the same of a pipeline's bubble; `kept_ms` is in no formula.
    """

    recorded: Recorded
    layout: Layout
    machine: Machine
    link: MeasuredLink | None
    overlap: float
    shown: float
    idle: float
    kept_ms: float

    def parts(self, layout: Layout, machine: Machine, work: float) -> dict[str, float]:
        """Return the ms of a step by part; `work` of a rank's step, the recorded one being 1.

        Raises CannotAnswer where a link that it needs is not known.
        """
        time = _time(self.recorded, layout, machine, self.overlap, work)
        # of another strategy it is not known how much of what is left shows
        shown = self.shown if layout.shard == self.layout.shard else 1.0
        return {
            "computing": time.compute * 1e3,
            "idle by the schedule": time.bubble * 1e3 * self.idle,
            "exposed communication": time.exposed * 1e3 * shown,
            "update": time.update * 1e3,
            "kept as it was": self.kept_ms * work,
        }

    def states_bytes(self, layout: Layout, machine: Machine) -> float:
        """Return weights, gradients, optimizer state and buckets of a rank.

        Raises CannotAnswer where their sizes are not recorded.
        """
        name = optimizer_of(self.recorded)
        if not self.recorded.item_bytes:
            raise CannotAnswer("how many weights the model has is not recorded")
        if not name:
            raise CannotAnswer("how much state the optimizer keeps of a weight is not recorded")
        return memory_of(planned_model(self.recorded, layout, 1.0), layout, machine, name).total


def engine_of(recorded: Recorded, place: int = 1) -> Engine:
    """Return the calibrated planner, with a link by one of the quantiles of transfer times.

    Raises CannotAnswer.
    """
    _check(recorded)
    parts = recorded.parts
    layout = layout_now(recorded)
    link = recorded.link(place) if layout.data > 1 else None
    machine = _machine(recorded, layout, link)
    kept = {name: parts[name] for name in ("data", "checkpoint", "other", "waiting")}
    if recorded.stages > 1:
        machine = replace(machine, inside=_FREE, between=_FREE)
        time = _time(recorded, layout, machine, 1.0, 1.0)
        # all that a stage does not compute: part of it by the schedule
        idle_ms = recorded.step_ms - recorded.stage_ms - parts["optimizer"] - sum(
            parts[name] for name in ("data", "checkpoint", "other")
        )  # fmt: skip
        bubble_ms = time.bubble * 1e3
        share = min(1.0, max(0.0, idle_ms / bubble_ms)) if bubble_ms else 1.0
        kept_ms = recorded.step_ms - recorded.stage_ms - parts["optimizer"] - share * bubble_ms
        return Engine(recorded, layout, machine, link, 1.0, 1.0, share, kept_ms)
    measured = parts["communication"]
    if layout.data == 1:
        kept_ms = sum(kept.values()) + measured
        return Engine(recorded, layout, machine, link, 1.0, 1.0, 1.0, kept_ms)
    overlap = _overlap(recorded, layout, machine, measured)
    exposed = _time(recorded, layout, machine, overlap, 1.0).exposed * 1e3
    shown = min(1.0, measured / exposed) if exposed else 1.0
    # what even no overlap at all explains: small messages, waits in calls
    kept_ms = sum(kept.values()) + max(0.0, measured - shown * exposed)
    return Engine(recorded, layout, machine, link, overlap, shown, 1.0, kept_ms)


_FREE = Link(1e18, 0.0)  # messages between stages are a part of what is kept


def layout_now(recorded: Recorded) -> Layout:
    """Return the layout that was recorded, as the planner has it."""
    microbatches = max(recorded.microbatches, 1)
    if recorded.stages > 1:
        return Layout(
            family="pipeline", pipeline=recorded.stages, schedule=recorded.schedule,
            chunks=recorded.chunks, microbatches=microbatches,
        )  # fmt: skip
    return data_layout(
        recorded, recorded.strategy or "ddp", recorded.ranks, microbatches,
        recorded.bucket_bytes,
    )  # fmt: skip


def data_layout(
    recorded: Recorded, strategy: str, ranks: int, microbatches: int, bucket_bytes: float
) -> Layout:
    """Return a data parallel layout that reduces as often as the recorded one."""
    return Layout(
        family=strategy, data=ranks, shard=SHARD[strategy], microbatches=microbatches,
        bucket_bytes=bucket_bytes or BUCKET_BYTES,
        # on processors only DDP sends beside its work
        overlaps=strategy == "ddp" or not recorded.processors,
        reduces_each=recorded.num_reductions > 1,
        has_bucket_copies=strategy == "ddp" and ranks > 1,
    )  # fmt: skip


def optimizer_of(recorded: Recorded) -> str:
    """Return an optimizer that keeps as much of a weight as this one did; empty if none does."""
    item = recorded.item_bytes
    if not item or not recorded.optimizer_bytes:
        return ""
    # a rank holds the same share of both
    each = recorded.optimizer_bytes / recorded.parameter_bytes * item
    for name, size in OPTIMIZER_BYTES.items():
        if abs(each - size) < _NEAR * max(size, 1):
            return name
    return ""


def _check(recorded: Recorded) -> None:
    if recorded.why_no_layout:
        raise CannotAnswer(recorded.why_no_layout)
    if not recorded.step_ms or not recorded.parts:
        raise CannotAnswer("of no step is known how long ranks worked and how long they waited")
    if recorded.ranks % recorded.nodes:
        problem = f"{recorded.ranks} ranks are spread unevenly over {recorded.nodes} nodes"
        raise CannotAnswer(problem)
    if recorded.stages > 1 and not (recorded.schedule and recorded.microbatches):
        raise CannotAnswer("the pipeline's schedule or number of microbatches is not recorded")
    if recorded.ranks > 1 and recorded.stages == 1:
        if not recorded.sent:
            raise CannotAnswer("no sizes of messages are recorded")
        if not recorded.strategy:
            raise CannotAnswer("the messages are not those of DDP, ZeRO or FSDP")


def planned_model(recorded: Recorded, layout: Layout, work: float = 1.0) -> Model:
    """Return the model: weights as recorded, and work that a rank's step has in any layout."""
    item = recorded.item_bytes or 4
    count = recorded.num_layers or 1
    weights = recorded.parameters or recorded.gradient_bytes / item
    each = recorded.weights_of_layer if recorded.num_layers else weights
    if recorded.stages > 1:  # only the stages' work is known, which they share evenly
        count = recorded.stages * recorded.chunks
        each, weights = 1.0, float(count)
    # one microbatch of this layout
    flops = _WORK * work * max(recorded.microbatches, 1) / layout.microbatches
    return Model(
        name="recorded", first=replace(_NOTHING, parameters=max(0.0, weights - count * each)),
        layer=Part(each, flops / count, 0.0, 0.0), num_layers=count, last=_NOTHING,
        precision=Precision("recorded", item, 0), tokens=1,
    )  # fmt: skip


def _machine(recorded: Recorded, layout: Layout, link: MeasuredLink | None) -> Machine:
    """Return the machine with which computing and update take what they took."""
    computing_ms = recorded.stage_ms or sum(recorded.parts[n] for n in ("forward", "backward"))
    work = _PASSES * layout.microbatches * _WORK / layout.pipeline
    machine = Machine(
        nodes=recorded.nodes, devices=recorded.devices, memory_bytes=0.0, reserved_bytes=0.0,
        fragmentation=0.0, flops=work / max(computing_ms * 1e-3, 1e-9), memory_bytes_per_second=1.0,
        inside=_FREE, between=_FREE,
    )  # fmt: skip
    update = _time(recorded, layout, machine, 1.0, 1.0).update
    measured = recorded.parts["optimizer"] * 1e-3
    rate = update / measured if measured > 0 else 0.0
    inside, between = _links(recorded, layout, link)
    return replace(machine, memory_bytes_per_second=rate, inside=inside, between=between)


def _links(
    recorded: Recorded, layout: Layout, link: MeasuredLink | None
) -> tuple[Link | None, Link | None]:
    """Return the links in a node and between that make the data axis's ring as fast as it was.

    Over several nodes it is the way between them that counts, of which each device of a node has
    its part; inside of a node it is at least as fast.
    """
    if layout.data == 1 or link is None:
        return None, None
    ring = Link(link.bytes_per_second, link.latency_seconds)
    if recorded.nodes == 1:
        return ring, None
    return ring, Link(link.bytes_per_second / recorded.devices, link.latency_seconds)


def _overlap(recorded: Recorded, layout: Layout, machine: Machine, measured_ms: float) -> float:
    """Return the share of a backward that hid messages, so that as much shows as was measured."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _time(recorded, layout, machine, middle, 1.0).exposed * 1e3 > measured_ms:
            low = middle
        else:
            high = middle
    return high


def _time(
    recorded: Recorded, layout: Layout, machine: Machine, overlap: float, work: float
) -> StepTime:
    """Return the planner's time. Raises CannotAnswer where a link is not known."""
    model = planned_model(recorded, layout, work)
    name = optimizer_of(recorded) or "adamw"  # only how an update shrinks with its shard counts
    found = step_time(model, layout, machine, name, overlap=overlap)
    if found is None:
        raise CannotAnswer(
            "how fast the link between nodes is was not recorded: the run was on one node"
            if machine.nodes > 1 else "how fast the link inside of a node is was not recorded"
        )  # fmt: skip
    return found
