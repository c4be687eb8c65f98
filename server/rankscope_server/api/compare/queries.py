"""What changed between two windows of steps, as the API answers it."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.answers import capped, to_ms
from rankscope_server.api.compare import drift as drifting
from rankscope_server.api.compare import sentence
from rankscope_server.api.compare.noise import (
    BLOCKS,
    LEAST_STEPS,
    PAIRS_SHARE,
    Change,
    Window,
    change_of,
    window_of,
)
from rankscope_server.api.compare.parts import LABELS, STEP, course, distribution
from rankscope_server.api.compare.schema import (
    CompareCourse,
    CompareFact,
    CompareFinding,
    CompareRate,
    CompareRow,
    CompareSide,
    CompareTimes,
    Comparison,
)
from rankscope_server.api.compare.sides import Asked, Side, command_of, read_side
from rankscope_server.api.compare.spread import rank_spreads_of, spread_text, spreads_of
from rankscope_server.api.runs.queries import run_before
from rankscope_server.api.steps.queries import bin_of, known, known_list
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.text import percent_text
from rankscope_server.text import plural
from rankscope_server.verdict.budget import PARTS

MAX_FACTS = 200
COURSE_WIDTH = 600  # bins of steps
MAX_UNKNOWN = 100
MAX_FINDINGS = 200
_WORK_LABELS = {"tokens": "Tokens", "samples": "Samples"}


def comparison(
    connection: sa.Connection, earlier: sa.Row[Any] | None, run: sa.Row[Any], old: Asked, new: Asked
) -> Comparison:
    """Return what changed from `earlier` to `run`; without `earlier` from the run before it."""
    after = read_side(connection, run, new)
    if earlier is None:
        earlier = run_before(connection, run)
    if earlier is None:
        return _alone(after)
    return compared(read_side(connection, earlier, old), after)


def compared(before: Side, after: Side) -> Comparison:
    """Return what changed from one side to the other."""
    is_same_attempt = (before.run.run_id, before.attempt) == (after.run.run_id, after.attempt)
    least = POLICY.slowdown_share if is_same_attempt else POLICY.regression_one_run
    windows = {
        name: (window_of(before.series[name]), window_of(after.series[name]))
        for name in (STEP, *PARTS)
    }
    changes = {name: change_of(*pair, least) for name, pair in windows.items()}
    labels = _labels(before, after)
    facts = drifting.facts_drift(before.facts, after.facts)
    around = drifting.by_weight(
        *drifting.nodes_drift(before.hosts, after.hosts),
        *drifting.command_drift(command_of(before), command_of(after)),
        *facts.rows,
    )
    old, new = (
        sentence.Side(label, window, side.work.get("tokens"), side.world_size, is_same_attempt)
        for label, window, side in zip(labels, windows[STEP], (before, after), strict=True)
    )
    parts = {name: changes[name] for name in PARTS}
    findings = _findings(before, after)
    spreads = spreads_of(before.series, after.series, changes)
    rank_spreads = rank_spreads_of(before.own_ms, after.own_ms, least)
    times = distribution(before.series[STEP], after.series[STEP])
    return Comparison(
        text=sentence.what_changed(old, new, changes[STEP], parts, around, facts.common),
        before=_side(before, labels[0], windows[STEP][0]),
        after=_side(after, labels[1], windows[STEP][1]),
        step=_row(STEP, "a step", windows[STEP], changes[STEP]),
        parts=[_row(name, LABELS[name], windows[name], changes[name]) for name in PARTS],
        rates=_rates(before, after, windows[STEP]),
        times=CompareTimes(
            edges_ms=[round(float(edge), 4) for edge in times.edges_ms],
            before=times.before.tolist(),
            after=times.after.tolist(),
            before_beyond=times.before_beyond,
            after_beyond=times.after_beyond,
        )
        if len(times.edges_ms)
        else None,
        spreads=spreads,
        rank_spreads=rank_spreads,
        spread_text=spread_text(spreads, rank_spreads, (len(before.own_ms), len(after.own_ms))),
        course=_course(before, after),
        facts=[_fact(one) for one in around[:MAX_FACTS]],
        num_common_facts=facts.common,
        unknown_facts=list(facts.unknown[:MAX_UNKNOWN]),
        findings=findings[:MAX_FINDINGS],
        not_comparable=_not_comparable(before, after, labels, windows),
        noise_text=_noise_text(least),
        facts_capped=capped(MAX_FACTS, len(around)),
        unknown_capped=capped(MAX_UNKNOWN, len(facts.unknown)),
        findings_capped=capped(MAX_FINDINGS, len(findings)),
        left_out=before.left_out + after.left_out,
    )


def _alone(after: Side) -> Comparison:
    label = after.run.name or after.run.run_id
    return Comparison(
        text=f"No run before it is called {label}: choose one to compare with.",
        before=None,
        after=_side(after, label, window_of(after.series[STEP])),
        step=None,
        parts=[],
        rates=[],
        times=None,
        spreads=[],
        rank_spreads=[],
        spread_text="",
        course=None,
        facts=[],
        num_common_facts=0,
        unknown_facts=[],
        findings=[],
        not_comparable=[],
        noise_text="",
        left_out=after.left_out,
    )


def _labels(before: Side, after: Side) -> tuple[str, str]:
    """Return how the sides are called: by the first of name, id, attempt and steps that differs."""
    names = [(side.run.name or side.run.run_id)[:80] for side in (before, after)]
    if before.run.run_id == after.run.run_id:
        if before.attempt == after.attempt:
            return _steps_text(before), _steps_text(after)
        return f"attempt {before.attempt}", f"attempt {after.attempt}"
    if names[0] == names[1]:
        return before.run.run_id, after.run.run_id
    return names[0], names[1]


def _steps_text(side: Side) -> str:
    return f"steps {side.lo:,} to {side.hi:,}" if side.hi >= side.lo else "steps that are not there"


def _side(side: Side, label: str, step: Window) -> CompareSide:
    run = side.run
    code = {
        fact: ", ".join(sorted(values))
        for fact, values in side.facts.items()
        if fact.startswith("code.")
    }
    return CompareSide(
        run_id=run.run_id,
        name=run.name or run.run_id,
        label=label,
        status=run.status,
        started_ms=to_ms(run.started_ns),
        is_imported=side.is_imported,
        world_size=side.world_size or None,
        num_nodes=len(side.hosts) or None,
        attempt=side.attempt,
        attempts=side.attempts,
        step_lo=side.lo,
        step_hi=side.hi,
        first_step=side.first,
        last_step=side.last,
        num_steps=step.count,
        onset_step=side.onset,
        code=code,
    )


def _row(name: str, label: str, windows: tuple[Window, Window], change: Change) -> CompareRow:
    before, after = windows
    ratio = after.median / before.median if before.median > 0 else np.nan
    return CompareRow(
        part=name,
        label=label,
        before_median_ms=known(before.median),
        before_p95_ms=known(before.p95),
        after_median_ms=known(after.median),
        after_p95_ms=known(after.p95),
        difference_ms=known(change.difference),
        low_ms=known(change.low),
        high_ms=known(change.high),
        ratio=known(ratio),
        state=change.state,
    )


def _course(before: Side, after: Side) -> CompareCourse | None:
    old, new = before.series[STEP], after.series[STEP]
    if np.isnan(old).all() or np.isnan(new).all():
        return None
    found = course(old, new, bin_of(max(len(old), len(new)), COURSE_WIDTH))
    at = range(0, found.bin * found.before.shape[1], found.bin)
    return CompareCourse(
        bin=found.bin,
        before_step=[before.lo + one for one in at],
        after_step=[after.lo + one for one in at],
        before_min_ms=known_list(found.before[0]),
        before_median_ms=known_list(found.before[1]),
        before_max_ms=known_list(found.before[2]),
        after_median_ms=known_list(found.after[1]),
        after_max_ms=known_list(found.after[2]),
    )


def _rates(before: Side, after: Side, step: tuple[Window, Window]) -> list[CompareRate]:
    """Return steps and work in a second, of the whole windows, and the work of a step."""
    per_second = [_steps_per_second(side) for side in (before, after)]
    rows = [_rate("steps_per_second", "Steps", "1/s", *per_second)]
    for name, label in _WORK_LABELS.items():
        work = [side.work.get(name) for side in (before, after)]
        if work == [None, None]:
            continue
        rows.append(_rate(f"{name}_per_step", f"{label} of a rank in a step", "", *work))
        speeds = [
            None if one is None or speed is None else one * speed
            for one, speed in zip(work, per_second, strict=True)
        ]
        rows.append(_rate(f"{name}_per_second", f"{label} of a rank", "1/s", *speeds))
    return rows


def _steps_per_second(side: Side) -> float | None:
    took = side.series[STEP]
    took = took[~np.isnan(took)]
    return len(took) * 1e3 / float(took.sum()) if len(took) and took.sum() > 0 else None


def _rate(
    name: str, label: str, unit: str, before: float | None, after: float | None
) -> CompareRate:
    ratio = after / before if before and after is not None else None
    return CompareRate(name=name, label=label, unit=unit, before=before, after=after, ratio=ratio)


def _fact(one: drifting.Drift) -> CompareFact:
    return CompareFact(
        fact=one.fact, kind=one.kind, severity=one.severity, text=sentence.drift_text(one),
        before=list(one.before), after=list(one.after),
    )  # fmt: skip


def _findings(before: Side, after: Side) -> list[CompareFinding]:
    """Return the findings of both sides, those of the later side alone first."""
    old, new = (
        {(one.kind, tuple(one.ranks), tuple(one.hosts)): one for one in reversed(side.findings)}
        for side in (before, after)
    )
    only_new = [key for key in new if key not in old]
    only_old = [key for key in old if key not in new]
    rows = []
    for key in (*only_new, *only_old, *(key for key in new if key in old)):
        shown = new.get(key) or old[key]
        rows.append(
            CompareFinding(
                kind=shown.kind,
                severity=shown.severity,
                what=shown.what,
                ranks=shown.ranks,
                cost_throughput_ratio=shown.cost_throughput_ratio,
                before_id=old[key].id if key in old else None,
                after_id=new[key].id if key in new else None,
                before_run=before.run.run_id,
                after_run=after.run.run_id,
            )
        )
    return rows


def _not_comparable(
    before: Side, after: Side, labels: tuple[str, str], windows: dict[str, tuple[Window, Window]]
) -> list[str]:
    """Return what cannot be compared, or only with care, and why."""
    found = []
    for place, side in enumerate((before, after)):
        of_side = {name: pair[place] for name, pair in windows.items()}
        found += _limits(side, labels[place], of_side)
    sizes = before.world_size, after.world_size
    if all(sizes) and sizes[0] != sizes[1]:
        found.append(
            f"{labels[0]} has {plural(sizes[0], 'rank')}, {labels[1]} {sizes[1]:,}: a step is not "
            "the same work, and the longest of more ranks is longer by chance alone"
        )
    if all(window.count for window in windows[STEP]) and bool(before.work) != bool(after.work):
        which = labels[0] if not before.work else labels[1]
        found.append(f"How much {which} does in a step is not known")
    return found


def _limits(side: Side, label: str, windows: dict[str, Window]) -> list[str]:
    """Return what is not known of one side."""
    step, found = windows[STEP], []
    if not step.count:
        found.append(f"{label} has no step {_where(side)}: its times are not known")
    elif step.count < LEAST_STEPS:
        found.append(
            f"{label} has {plural(step.count, 'step')} here: below {LEAST_STEPS} noise is not "
            "known, and no difference is called one"
        )
    if side.is_live:
        found.append(f"{label} is still {side.run.status}: what is said of it may change")
    if side.is_imported:
        found.append(f"{label} was recorded by another tool: what that left out is not known")
    if not side.num_with_facts:
        found.append(f"{label} sent no facts of its environment: none is called a difference")
    missing = [LABELS[name] for name in PARTS if not windows[name].count]
    if step.count and len(missing) == len(PARTS):
        found.append(f"What steps of {label} wait for is not known: their parts are not shown")
    elif step.count and missing:
        found.append(f"{label} has no times of: {', '.join(missing)}")
    return found


def _where(side: Side) -> str:
    if side.last < 1:
        return "yet"
    return f"in the range asked for; it has {side.first:,} to {side.last:,}"


def _noise_text(least: float) -> str:
    return (
        f"A difference counts where it is above {percent_text(least)} and "
        f"{percent_text(PAIRS_SHARE)} of all pairs of blocks, up to {BLOCKS} of each side, differ "
        "in one direction; the range holds eight in ten of these pairs"
    )
