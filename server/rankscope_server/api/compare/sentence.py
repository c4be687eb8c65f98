"""What changed, in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_server.api.compare.drift import NODE, OPTION, Drift
from rankscope_server.api.compare.noise import LEAST_STEPS, Change, Window
from rankscope_server.api.compare.parts import LABELS
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.text import cut, ms_text, percent_text
from rankscope_server.text import plural

_TIMES, _MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
_ARROW = "\N{RIGHTWARDS ARROW}"
_MOST_DRIFT = 2
_SAME_WORK = 0.01  # tokens of a step that differ by less are the same amount


@dataclass(frozen=True, slots=True)
class Side:
    """How one side is called, and what it does in a step."""

    name: str  # "run-7", "steps 130 to 300"
    step: Window
    tokens: float | None = None  # of a rank in a step
    world_size: int = 0  # 0: not known
    is_steps: bool = False  # its name is a range of steps


def what_changed(
    before: Side,
    after: Side,
    step: Change,
    parts: Mapping[str, Change],
    drifts: Sequence[Drift],
    num_common: int = 0,
) -> str:
    """Return the first sentence of the page; `num_common` facts are alike on both sides."""
    missing = [side.name for side in (before, after) if side.step.count == 0]
    if missing:
        return f"No steps to compare: {' and '.join(missing)} recorded none here{_drift(drifts)}."
    subject = after.name.capitalize() if after.is_steps else "Steps"
    than = before.name if after.is_steps else f"in {before.name}"
    old, new = before.step.median, after.step.median
    if step.state == "unknown":
        few = min(before.step.count, after.step.count)
        text = (
            f"{subject} take {ms_text(new)}, {ms_text(old)} {than}: too few steps to "
            f"distinguish that from noise (needs {LEAST_STEPS}, has {few})"
        )
    elif step.state == "same":
        text = (
            f"{subject} take as long as {than}: no difference beyond noise ({ms_text(new)} against "
            f"{ms_text(old)})"
        )
    else:
        work = _work(before, after)
        is_longer = step.state == "longer"
        pair = ("longer", "shorter") if work else ("slower", "faster")
        text = f"{subject} are {_factor(old, new)} {pair[not is_longer]} than {than}"
        text += work or _cause(step, parts)
        is_alike = num_common and before.world_size == after.world_size and not work
        if is_alike and not drifts and not after.is_steps:
            text += "; nothing else that is known of them differs"
    return f"{text}{_drift(drifts)}."


def _factor(old: float, new: float) -> str:
    low, high = sorted((old, new))
    ratio = high / max(low, 1e-9)
    if ratio < 1.1:
        return percent_text(abs(new / old - 1))
    return f"{ratio:.2f}{_TIMES}" if ratio < 10 else f"{ratio:.0f}{_TIMES}"


def _work(before: Side, after: Side) -> str:
    """Return how much a step does and how much is done in a second, where steps differ in it."""
    if before.world_size and after.world_size and before.world_size != after.world_size:
        ranks = plural(after.world_size, "rank")
        return f", on {ranks} instead of {before.world_size:,}: a step is not the same work"
    if not before.tokens or not after.tokens:
        return ""
    ratio = after.tokens / before.tokens
    if abs(ratio - 1) < _SAME_WORK:
        return ""
    speed = ratio * before.step.median / after.step.median
    return f", with {_times(ratio)} the tokens of a step: {_times(speed)} the tokens a second"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}".rstrip("0").rstrip(".") + _TIMES


def _cause(step: Change, parts: Mapping[str, Change]) -> str:
    """Return which part holds the difference, or that none holds most of it."""
    known = {name: part for name, part in parts.items() if part.state != "unknown"}
    if not known:
        return "; where in the step is not known, as its waits are not"
    sign = 1 if step.difference > 0 else -1
    name, most = max(known.items(), key=lambda one: sign * one[1].difference)
    share = most.difference / step.difference
    wanted = "longer" if sign > 0 else "shorter"
    if most.state != wanted or share < POLICY.min_explained_share:
        return "; no single part of the step holds most of it"
    amount = f"{'+' if sign > 0 else _MINUS}{ms_text(abs(most.difference))} a step"
    return f": {percent_text(min(share, 1.0))} of it is {LABELS[name]} ({amount})"


def _drift(drifts: Sequence[Drift]) -> str:
    """Return what differs around the steps, what may matter most first."""
    weight = {"critical": 0, "warning": 1}
    ordered = sorted(
        (one for one in drifts if one.severity != "info" or one.kind in (NODE, OPTION, "code")),
        key=lambda one: (weight.get(one.severity, 2), one.kind != OPTION),
    )
    texts = [drift_text(one) for one in ordered[:_MOST_DRIFT]]
    if not texts:
        return ""
    rest = len(drifts) - len(texts)
    if rest:
        texts.append(f"{plural(rest, 'other difference')}")
    joined = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"; {joined}"


def drift_text(drift: Drift) -> str:
    """Return one difference: "nccl 2.26 -> 2.27", "node-b is new"."""
    old, new = _values(drift.before), _values(drift.after)
    if drift.kind == NODE:
        return f"{drift.fact} is new" if new else f"{drift.fact} is gone"
    name = drift.fact.removeprefix("env.").removesuffix(".version")
    if drift.kind == OPTION and not (old and new):
        return f"{name} {new} is new" if new else f"{name} {old} is gone"
    was, now = set(drift.before), set(drift.after)
    if was < now or now < was:
        more, rest = sorted(was ^ now), sorted(was & now)
        what = "new" if was < now else "gone"
        return f"{name} {_values(more)} is {what} beside {_values(rest)}"
    return f"{name} {old} {_ARROW} {new}"


def _values(values: Sequence[str]) -> str:
    shown = ", ".join(cut(value, 40) for value in values[:2])
    return shown + (f" and {len(values) - 2} more" if len(values) > 2 else "")
