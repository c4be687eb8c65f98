"""What must change nothing, for all detectors on a run of each kind of fault.

Ranks by other names, other clocks, all times longer, items doubled, late and in any order, and
looks on the way: the findings stay the same, with ranks and times mapped.
"""

from __future__ import annotations

import dataclasses
import os
import random
from functools import lru_cache

import pytest

from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.score.cases import DIAGNOSES, Case, case_of
from tests.score.outcome import SILENCE_MS
from tests.simulator.delivery import apply, deliver, relabelled, shuffled
from tests.simulator.job import Job
from tests.simulator.records import MS, START_NS, Item, Recording

SCALE = 3.0
SEED = int(os.environ.get("RANKSCOPE_SCORE_SEED", "1"))  # others by hand: each has its own layout
NAMES = [diagnosis.name for diagnosis in DIAGNOSES]


def case_named(name: str) -> Case:
    diagnosis = next(one for one in DIAGNOSES if one.name == name)
    return case_of(diagnosis, diagnosis.smallest, SEED)


@lru_cache(maxsize=4)
def recorded(job: Job, calls: bool, scale: float = 1.0) -> tuple[tuple[Item, ...], float]:
    """Return everything up to long after the last move, and the time of the last look, ms."""
    recording = Recording(job, collectives=calls)
    items = list(recording.items(per_chunk=10))
    at_ms = recording.stopped_ms() + SILENCE_MS * scale
    return (*items, *recording.states(at_ms)), at_ms


def items_of(case: Case) -> tuple[list[Item], float]:
    items, at_ms = recorded(case.job, "calls" in case.diagnosis.needs)
    return list(items), at_ms


def look(items: list[Item], at_ms: float) -> list[Finding]:
    state = RunState("same")
    apply(state, items)
    return state.look(START_NS + int(at_ms * MS)).findings


def said(findings: list[Finding], old: dict[int, int] | None = None) -> list[tuple[object, ...]]:
    """Return what does not depend on names and clocks; `old` gives ranks their first names."""
    return sorted(
        (
            finding.detector, finding.kind, finding.severity, finding.state, finding.hosts,
            finding.onset_step,
            finding.ended_step, finding.explained_by is None,
            tuple(sorted(old[rank] if old else rank for rank in finding.ranks)),
        )
        for finding in findings
    )  # fmt: skip


def costs(findings: list[Finding]) -> list[float]:
    return sorted(finding.cost_throughput_ratio or 0.0 for finding in findings)


@pytest.mark.parametrize("name", NAMES)
def test_order_doubles_and_late_items_change_nothing(name: str) -> None:
    items, at_ms = items_of(case_named(name))
    plain = look(items, at_ms)
    mixed = shuffled([*items, *items[::2]], seed=5)
    assert said(look(mixed, at_ms)) == said(plain)
    late = deliver(items, 3, lost=0.0, late=0.3, doubled=0.3)
    assert said(look(late, at_ms)) == said(plain)
    if case_named(name).job.faults:
        assert plain


@pytest.mark.parametrize("name", NAMES)
def test_ranks_by_other_names_are_found_under_these(name: str) -> None:
    items, at_ms = items_of(case_named(name))
    new = list(range(case_named(name).job.num_ranks))
    random.Random(7).shuffle(new)
    back = {number: old for old, number in enumerate(new)}
    found = look(relabelled(items, new), at_ms)
    assert said(found, back) == said(look(items, at_ms))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "clock set"])
def test_other_clocks_change_nothing_but_what_is_said_of_clocks(name: str) -> None:
    case = case_named(name)
    items, at_ms = items_of(case)
    noise = dataclasses.replace(case.job.noise, clock_offset_ms=400.0, clock_drift_ppm=40.0)
    job = dataclasses.replace(case.job, noise=noise)
    other, _ = recorded(job, "calls" in case.diagnosis.needs)
    without = [one for one in look(list(other), at_ms) if one.kind != "clock_offset"]
    plain = [one for one in look(items, at_ms) if one.kind != "clock_offset"]
    assert said(without) == said(plain)


@pytest.mark.parametrize("name", NAMES)
def test_longer_times_make_longer_findings_and_no_others(name: str) -> None:
    case = case_named(name)
    plain = look(*items_of(case))
    job = dataclasses.replace(
        case.job, forward_ms=SCALE * case.job.forward_ms, data_ms=SCALE * case.job.data_ms,
        optimizer_ms=SCALE * case.job.optimizer_ms, transfer_ms=SCALE * case.job.transfer_ms,
        save_ms=SCALE * case.job.save_ms, issue_ms=SCALE * case.job.issue_ms,
    )  # fmt: skip
    items, at_ms = recorded(job, "calls" in case.diagnosis.needs, SCALE)
    scaled = look(list(items), at_ms)

    def loud(findings: list[Finding]) -> list[tuple[object, ...]]:
        chosen = [finding for finding in findings if finding.severity != "info"]
        return [(*row[:2], *row[3:]) for row in said(chosen)]

    assert loud(scaled) == loud(plain)
    if [one.kind for one in scaled] == [one.kind for one in plain]:
        assert costs(scaled) == pytest.approx(costs(plain), abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_looks_on_the_way_do_not_change_the_last_one(name: str) -> None:
    items, at_ms = items_of(case_named(name))
    watched = RunState("same")
    for begin in range(0, len(items), 40):
        apply(watched, items[begin : begin + 40])
        watched.look(max(item[0] for item in items[begin : begin + 40]))
    end_ns = START_NS + int(at_ms * MS)
    assert said(watched.look(end_ns).findings) == said(look(items, at_ms))
