"""Every way to share a model over a machine: what fits, what it takes, and which to choose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankscope.planning.layout import ASYNCHRONOUS, FAMILIES, Layout, candidates
from rankscope.planning.machine import Machine
from rankscope.planning.memory import Memory, memory_of
from rankscope.planning.model import Model
from rankscope.planning.stages import stages_of
from rankscope.planning.step import OVERLAP_LOW, StepTime, step_time
from rankscope.planning.traffic import Messages, messages_of
from rankscope.planning.units import Price, bytes_text, seconds_text

AS_FAST = 1.05  # within this a simpler layout is chosen: no prediction is finer
_SIMPLE = tuple(FAMILIES)  # from simple to hard to set up


@dataclass(frozen=True, slots=True)
class Outcome:
    """One layout on one machine. Times are None where a rate or a link is not known."""

    layout: Layout
    memory: Memory
    fits: bool
    time: StepTime | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    messages: tuple[Messages, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Return the time of a step."""
        return None if self.time is None else self.time.total

    @property
    def sent_bytes(self) -> float:
        """Return what a rank sends in a step."""
        return sum(messages.sent_bytes for messages in self.messages)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A strategy that is not offered, and why."""

    family: str
    reason: str
    closest: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: the best layout of each strategy that fits, the best first; and the others."""

    model: Model
    machine: Machine
    batch: int
    optimizer: str
    outcomes: tuple[Outcome, ...]
    left_out: tuple[LeftOut, ...]
    num_tried: int
    num_fitting: int
    why: str

    @property
    def chosen(self) -> Outcome | None:
        """Return the one to take; None where nothing fits."""
        return self.outcomes[0] if self.outcomes else None

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.batch * self.model.tokens


def outcome_of(
    model: Model, layout: Layout, machine: Machine, optimizer: str, *, is_whole: bool = True
) -> Outcome:
    """Return what one layout takes; `is_whole` with its bounds and messages."""
    memory = memory_of(model, layout, machine, optimizer)
    fits = memory.total <= machine.memory_bytes
    time = step_time(model, layout, machine, optimizer)
    if not is_whole:
        return Outcome(layout, memory, fits, time)
    low = high = None
    if time is not None:
        bounds = ((machine.flops_high, 1.0), (machine.flops_low, OVERLAP_LOW))
        low, high = (
            bound.total
            for flops, overlap in bounds
            if (bound := step_time(model, layout, machine, optimizer, flops=flops, overlap=overlap))
        )
    stage = max(stages_of(model, layout), key=lambda stage: stage.parameters)
    messages = tuple(messages_of(model, layout, stage))
    return Outcome(layout, memory, fits, time, low, high, messages)


def plan_of(
    model: Model,
    machine: Machine,
    *,
    batch: int,
    optimizer: str,
    families: tuple[str, ...] = (),
) -> Plan:
    """Try every layout; return the best of each strategy, and what was left out."""
    tried: dict[str, list[Outcome]] = {}
    for layout in candidates(model, machine, batch, families=families):
        outcome = outcome_of(model, layout, machine, optimizer, is_whole=False)
        tried.setdefault(layout.family, []).append(outcome)
    fitting = {
        family: best
        for family, outcomes in tried.items()
        if (best := _best(outcome for outcome in outcomes if outcome.fits))
    }
    ranked = _ranked(
        [outcome_of(model, best.layout, machine, optimizer) for best in fitting.values()]
    )
    everything = [outcome for outcomes in tried.values() for outcome in outcomes]
    return Plan(
        model=model, machine=machine, batch=batch, optimizer=optimizer, outcomes=tuple(ranked),
        left_out=tuple(
            _left_out(family, tried.get(family, []), model, machine, batch)
            for family in families or (*FAMILIES, *ASYNCHRONOUS)
            if family not in fitting
        ),
        num_tried=len(everything), num_fitting=sum(outcome.fits for outcome in everything),
        why=_why(ranked, machine),
    )  # fmt: skip


def _best(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the fastest; without times the one that sends least and recomputes nothing."""
    return min(outcomes, key=_slowness, default=None)


def _slowness(outcome: Outcome) -> tuple[float, ...]:
    layout, idle = outcome.layout, 0.0
    if outcome.seconds is not None:
        return (outcome.seconds, outcome.memory.total)
    if layout.pipeline > 1:
        idle = (layout.pipeline - 1) / (layout.chunks * layout.microbatches + layout.pipeline - 1)
    return (float(layout.recomputes), idle, outcome.memory.total)


def _simplicity(outcome: Outcome) -> int:
    family = outcome.layout.family
    return _SIMPLE.index(family) if family in _SIMPLE else len(_SIMPLE)


def _ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return them, the one to take first, then by time; without times by how simple they are."""
    timed = [outcome for outcome in outcomes if outcome.seconds is not None]
    unknown = sorted((o for o in outcomes if o.seconds is None), key=_simplicity)
    if not timed:
        return unknown
    by_time = sorted(timed, key=lambda outcome: outcome.seconds or 0.0)
    limit = AS_FAST * (by_time[0].seconds or 0.0)
    chosen = min((o for o in by_time if (o.seconds or 0.0) <= limit), key=_simplicity)
    return [chosen, *(o for o in by_time if o is not chosen), *unknown]


def _why(ranked: Sequence[Outcome], machine: Machine) -> str:
    if not ranked:
        return ""
    chosen = ranked[0]
    if chosen.seconds is None:
        return f"No step time ({unknown_rates(machine)}); this one is the simplest that fits"
    others = [o for o in ranked[1:] if o.seconds is not None]
    if not others:
        return "Nothing else fits"
    best = min(others, key=lambda outcome: outcome.seconds or 0.0)
    assert best.seconds is not None
    if best.seconds < chosen.seconds:
        slower = chosen.seconds / best.seconds - 1
        return (
            f"{best.layout.family} is only {slower:.1%} faster, less than a prediction "
            f"distinguishes, and harder to set up"
        )
    return (
        f"The fastest that fits: {chosen.layout.family} takes {seconds_text(chosen.seconds)}, the "
        f"next, {best.layout.family}, {seconds_text(best.seconds)}"
    )


def unknown_rates(machine: Machine) -> str:
    """Return which rates are missing; empty where all are known."""
    missing = []
    if not machine.flops:
        missing.append("the rate of a device")
    if machine.devices > 1 and machine.inside is None:
        missing.append("the link inside of a node")
    if machine.nodes > 1 and machine.between is None:
        missing.append("the link between nodes")
    return f"not known: {', '.join(missing)}" if missing else ""


def _left_out(
    family: str, outcomes: Sequence[Outcome], model: Model, machine: Machine, batch: int
) -> LeftOut:
    if outcomes:
        closest = min(outcomes, key=lambda outcome: outcome.memory.total)
        if closest.fits:  # only where a name was asked for twice
            return LeftOut(family, "", closest)
        needs, has = closest.memory.total, machine.memory_bytes
        reason = f"does not fit: {bytes_text(needs)} of {bytes_text(has)} ({closest.layout.text})"
        return LeftOut(family, reason, closest)
    if family in ASYNCHRONOUS:
        return LeftOut(family, f"{ASYNCHRONOUS[family]}; asked for by --strategy {family}")
    return LeftOut(family, _impossible(family, model, machine, batch))


def _impossible(family: str, model: Model, machine: Machine, batch: int) -> str:
    ranks = machine.ranks
    if ranks == 1 and family not in ("ddp", "zero1", "zero2", "fsdp"):
        return "there is one rank"
    if family in ("ddp", "zero1", "zero2", "fsdp", "hsdp"):
        if family == "hsdp" and (machine.nodes == 1 or machine.devices == 1):
            return "needs several nodes of several devices"
        return f"a batch of {batch} cannot be dealt evenly to {ranks} ranks"
    if family == "parameter_server":
        return f"a batch of {batch} cannot be dealt evenly to what 1, 2, 4, ... servers leave"
    if "tensor" in family and not model.heads:
        return "how to cut these layers is not known of a module; give its numbers instead"
    if family == "tensor" and ranks > machine.devices:
        return f"its sums would cross nodes: {ranks} ranks, {machine.devices} on a node"
    if "tensor" in family and machine.devices == 1:
        return "one device on a node: its sums would cross nodes"
    if family == "pipeline" and ranks > model.num_layers:
        return f"{model.num_layers} layers cannot fill {ranks} stages"
    return f"no sizes of axes divide {ranks} ranks, the layers, the heads and a batch of {batch}"


def mfu(plan: Plan, outcome: Outcome, peak_flops: float) -> float | None:
    """Return the share of the peak that the model's own FLOPs are (PaLM, appendix B)."""
    if outcome.seconds is None or not peak_flops:
        return None
    flops = 3.0 * plan.model.forward_flops * plan.batch
    return flops / outcome.seconds / (peak_flops * plan.machine.ranks)


def days_for(plan: Plan, outcome: Outcome, tokens: float) -> float | None:
    """Return the days that so many tokens take."""
    if outcome.seconds is None:
        return None
    return tokens / plan.tokens * outcome.seconds / 86_400


def money_of_step(plan: Plan, outcome: Outcome, price: Price) -> float | None:
    """Return what a step costs over all devices."""
    if outcome.seconds is None:
        return None
    hours = plan.machine.ranks * outcome.seconds / 3_600
    return hours * price.per_device_hour(plan.machine.devices)
