"""What changes of the layout would give, each with its band, and what is assumed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rankscope.planning.errors import PlanError
from rankscope.planning.layout import Layout
from rankscope.planning.machine import BETWEEN_LATENCY_SECONDS, Link, Machine
from rankscope.planning.step import OVERLAP_LOW
from rankscope_server.diagnose.communication.transfer_model import CAPS_MB
from rankscope_server.what_if.engine import (
    SHARD,
    CannotAnswer,
    Engine,
    data_layout,
    engine_of,
)
from rankscope_server.what_if.recorded import QUANTILES, Recorded

_TO_DDP = "strategy ddp"
# By how much real runs took less or more than was predicted, as shares of the prediction: the
# widest of each kind in docs/plan.md, "A run that was recorded", rounded up to 5 %, at least 10 %.
# Links, which no machine of one node can change, as ranks.
MISSED: dict[str, tuple[float, float]] = {
    "strategy": (0.10, 0.30),
    _TO_DDP: (0.40, 0.10),
    "ranks": (0.10, 0.10),
    "microbatches": (0.10, 0.50),
    "link": (0.10, 0.10),
    "bucket": (0.15, 0.10),
}
REPLAY_MISSED = 0.10  # of a step without its slow rank; 4 % in simulated jobs (docs/cost.md)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be otherwise, all of it at once; an empty one changes nothing."""

    strategy: str = ""
    add_nodes: int = 0
    ranks_per_node: int = 0
    link_times: float = 1.0
    microbatches: int = 0
    bucket_bytes: float = 0.0
    between_bytes_per_second: float = 0.0  # of a rank's way to another node, where it is not known

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return what of the layout it changes, by the names of MISSED."""
        is_of = {
            "strategy": bool(self.strategy), "ranks": bool(self.add_nodes or self.ranks_per_node),
            "microbatches": bool(self.microbatches), "link": self.link_times != 1.0,
            "bucket": bool(self.bucket_bytes),
        }  # fmt: skip
        return tuple(name for name, changes in is_of.items() if changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A step with a change; `memory_bytes` None: not known, `no_memory` says why."""

    step_ms: float
    low_ms: float
    high_ms: float
    parts: dict[str, float]  # ms
    ranks: int
    layout: Layout
    memory_bytes: float | None
    no_memory: str
    assumptions: tuple[str, ...]
    band: str  # where it is from


def check(change: Change, recorded: Recorded) -> None:
    """Raise PlanError, with the field, for what cannot be of this run."""
    nodes = recorded.nodes + change.add_nodes
    if nodes < 1:
        problem = f"{-change.add_nodes} fewer nodes leave none of {recorded.nodes}"
        raise PlanError("add_nodes", problem, f"Take at most {recorded.nodes - 1} away")
    is_pipeline = recorded.stages > 1
    for field, is_set in (
        ("strategy", change.strategy), ("bucket_mib", change.bucket_bytes),
        ("add_nodes", change.add_nodes), ("ranks_per_node", change.ranks_per_node),
        ("link_times", change.link_times != 1.0),
    ):  # fmt: skip
        if is_set and is_pipeline:
            problem = "this run is a pipeline, of whose stages only the work is known"
            raise PlanError(field, problem, "Change microbatches or without; see rankscope plan")
    strategy = change.strategy or recorded.strategy
    if change.bucket_bytes and strategy and strategy != "ddp":
        problem = f"{strategy} has no buckets of a chosen size"
        raise PlanError("bucket_mib", problem, "Leave it out, or change to ddp")


def answer(recorded: Recorded, change: Change, ratio: float = 1.0) -> Answer:
    """Return a step with this change; `ratio` is what a replay made of the step by other ones.

    Raises CannotAnswer.
    """
    engine = engine_of(recorded)
    layout, machine, work = _changed(engine, change)
    _check_groups(recorded, layout)
    parts = engine.parts(layout, machine, work)
    total = ratio * sum(parts.values())
    if ratio != 1.0:
        parts["saved by the replay"] = total - sum(parts.values())
    low, high = (ratio * bound for bound in _bounds(recorded, change))
    is_to_ddp = change.strategy == "ddp"  # from what did more for each message than is known
    kinds = [_TO_DDP if kind == "strategy" and is_to_ddp else kind for kind in change.kinds]
    missed = [MISSED[kind] for kind in kinds]
    missed += [(REPLAY_MISSED, REPLAY_MISSED)] * (ratio != 1.0)
    under, over = (max((pair[side] for pair in missed), default=0.0) for side in (0, 1))
    memory, no_memory = _memory(engine, layout, machine)
    return Answer(
        step_ms=total, low_ms=min(total, low) * (1 - under), high_ms=max(total, high) * (1 + over),
        parts=parts, ranks=machine.ranks, layout=layout, memory_bytes=memory, no_memory=no_memory,
        assumptions=_assumed(engine, change, layout, machine, ratio),
        band=_band(engine, under, over),
    )  # fmt: skip


def _changed(engine: Engine, change: Change) -> tuple[Layout, Machine, float]:
    """Return layout, machine and how much longer a rank's work takes there."""
    recorded = engine.recorded
    machine = _machine(engine, change)
    microbatches = change.microbatches or engine.layout.microbatches
    if recorded.stages > 1:
        return replace(engine.layout, microbatches=microbatches), machine, 1.0
    if change.microbatches and not recorded.microbatches:
        raise CannotAnswer("how many microbatches a step has now is not recorded")
    if machine.ranks > 1 and not (recorded.parameters or recorded.sent):
        raise CannotAnswer("how many weights the model has is not recorded")
    layout = data_layout(
        recorded, change.strategy or engine.layout.family, machine.ranks, microbatches,
        change.bucket_bytes or recorded.bucket_bytes,
    )  # fmt: skip
    return layout, machine, _share_of_processors(recorded, machine.devices)


def _machine(engine: Engine, change: Change) -> Machine:
    now, recorded = engine.machine, engine.recorded
    inside, between = now.inside, now.between
    if change.between_bytes_per_second and between is None:
        between = Link(change.between_bytes_per_second, BETWEEN_LATENCY_SECONDS)
    if change.link_times != 1.0:
        if engine.layout.data == 1:
            raise CannotAnswer("one rank sends nothing")
        inside, between = (_faster(link, change.link_times) for link in (inside, between))
    return replace(
        now, nodes=recorded.nodes + change.add_nodes, inside=inside, between=between,
        devices=change.ranks_per_node or recorded.devices,
    )  # fmt: skip


def _faster(link: Link | None, times: float) -> Link | None:
    return None if link is None else replace(link, bytes_per_second=link.bytes_per_second * times)


def _share_of_processors(recorded: Recorded, devices: int) -> float:
    """Return how much longer work takes where ranks of a node share its processors otherwise.

    What was not spent on a processor, as in input and output, takes as long as before.
    """
    if not recorded.processors:
        return 1.0
    then, now = (max(1.0, count / recorded.processors) for count in (devices, recorded.devices))
    return 1.0 + min(1.0, recorded.processor_share * now) * (then / now - 1.0)


def _check_groups(recorded: Recorded, layout: Layout) -> None:
    if layout.shard == 3 and layout.data > 1:
        if not recorded.parameters:
            raise CannotAnswer("how many weights the model has is not recorded")
        if not recorded.num_layers:
            raise CannotAnswer(
                "how many layers the model has is not recorded, and so how many messages FSDP "
                "would take: give layers"
            )


def _bounds(recorded: Recorded, change: Change) -> tuple[float, float]:
    """Return the shortest and longest step over what the recorded transfer times allow."""
    found = []
    for place in range(len(QUANTILES)):
        for engine in _variants(engine_of(recorded, place)):
            layout, machine, work = _changed(engine, change)
            overlaps = {engine.overlap}
            if change.strategy and layout.overlaps:
                overlaps |= {1.0, OVERLAP_LOW}
            for overlap in overlaps:
                parts = replace(engine, overlap=overlap).parts(layout, machine, work)
                found.append(sum(parts.values()))
    return min(found), max(found)


def _variants(engine: Engine) -> Iterator[Engine]:
    """Yield the engine; where sizes did not separate the two, also with all time as latency."""
    yield engine
    link, recorded = engine.link, engine.recorded
    if link is None or link.is_split or not recorded.bucket_bytes:
        return
    slow = Link(1e18, recorded.bucket_bytes / link.bytes_per_second / recorded.ranks)
    between = None if engine.machine.between is None else slow
    yield replace(engine, machine=replace(engine.machine, inside=slow, between=between))


def _memory(engine: Engine, layout: Layout, machine: Machine) -> tuple[float | None, str]:
    """Return the memory of a rank: what was measured, with other states. None, and why."""
    recorded = engine.recorded
    if not recorded.memory_bytes:
        return None, "no memory of a rank was recorded"
    if recorded.stages > 1:
        return None, "how much activations take is not recorded"
    if layout.microbatches != engine.layout.microbatches:
        return None, (
            "activations become smaller or larger with microbatches, and which part of the "
            "memory they are is not recorded"
        )
    try:
        now, then = (
            engine.states_bytes(one, where)
            for one, where in ((engine.layout, engine.machine), (layout, machine))
        )
    except CannotAnswer as error:
        return None, str(error)
    return recorded.memory_bytes + then - now, ""


def _assumed(
    engine: Engine, change: Change, layout: Layout, machine: Machine, ratio: float
) -> tuple[str, ...]:
    recorded, is_other = engine.recorded, bool(change.strategy)
    reduced = "after each microbatch" if layout.reduces_each else "once"
    said = (
        (True, "each rank has as many samples of a step as now"),
        (change.microbatches, "they are cut into other microbatches, and a sample takes as long in "
         "a small one as in a large one"),
        (recorded.stages > 1, "messages between stages take as long in sum as now"),
        (is_other and layout.shard == 3, f"each of {recorded.num_layers} layers, and what is "
         f"outside of them, is gathered by itself, and its gradient reduced {reduced}"),
        (is_other and not layout.overlaps, "on processors nothing is sent beside computing"),
        (is_other, "what a library does by itself for each message costs nothing"),
        (machine.ranks != recorded.ranks, "ranks wait as long for each other as now, however many "
         "they are"),
        (machine.devices != recorded.devices and recorded.processors,
         f"the ranks of a node share its {recorded.processors} processors evenly"),
        (machine.nodes > 1 and recorded.nodes == 1, "the link between nodes is as given, with the "
         "latency of NCCL's own estimate"),
        (change.link_times != 1.0, "the latency of a message stays as it is"),
        (engine.layout.shard == 0 and layout.data > 1, "DDP keeps a copy of the gradients in its "
         "buckets"),
        (ratio != 1.0, "the replay saves the same share of a step as it does now"),
        (change.kinds, "data loading and what is outside of phases stay as they are"),
    )  # fmt: skip
    return tuple(text for is_said, text in said if is_said)


def _band(engine: Engine, under: float, over: float) -> str:
    texts = []
    if engine.link is not None:
        texts.append("the quicker and the slower quarter of the recorded transfers")
        if not engine.link.is_split:
            texts.append("their time as bandwidth or as latency, as all have nearly one size")
    if under or over:
        texts.append(
            f"by how much such predictions missed real runs (\u2212{under:.0%}, +{over:.0%}: "
            "docs/plan.md)"
        )
    return "; ".join(texts)


def offered(recorded: Recorded) -> list[Change]:
    """Return changes that make sense for this run, each alone."""
    now = max(recorded.microbatches, 1)
    if recorded.why_no_layout:  # which each of them says
        return [Change(link_times=2.0), Change(add_nodes=1)]
    if recorded.stages > 1:
        return [Change(microbatches=times * now) for times in (2, 4)]
    found = [Change(add_nodes=1), *[Change(microbatches=2 * now)] * (recorded.microbatches > 0)]
    if recorded.nodes > 1:
        found.append(Change(add_nodes=-1))
    if recorded.ranks > 1:
        found.append(Change(link_times=2.0))
        found += [Change(strategy=name) for name in SHARD if name != recorded.strategy]
    if recorded.strategy == "ddp":
        sizes = [float(mib * _MIB) for mib in CAPS_MB if mib * _MIB < 2 * recorded.gradient_bytes]
        found += [Change(bucket_bytes=size) for size in sizes]
    return found
