"""Good recordings, what is wrong in them, and what may be said when a part of them never came."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.policy import POLICY
from rankscope_server.verdict.answers import Look
from tests.analysis import simulator, timeline
from tests.simulator import job as jobs
from tests.simulator.delivery import apply
from tests.simulator.dropping import BLIND, Drop, draw, left_of
from tests.simulator.records import Recording
from tests.simulator.told import MS, START_NS, Item

SILENCE_MS = 15_000.0  # after the last move: long enough for a hang to be named


@dataclass(frozen=True)
class Run:
    """A recording, and the ranks that are at fault in it; looks are taken at `looks_ms`."""

    name: str
    items: tuple[Item, ...]  # with states, in order of arrival
    looks_ms: tuple[float, ...]
    guilty: frozenset[int]
    num_ranks: int
    num_steps: int


@dataclass(frozen=True)
class Case:
    """One drawn case: what was dropped of a run, what was said, and what is wrong with that."""

    run: str
    seed: int
    drops: tuple[Drop, ...]
    state: str
    answer: str
    wrong: str = ""  # empty: right


FAULTS = ("clean", "slow_compute", "slow_data", "hang", "crash")
SHAPES = {
    "ddp-8": {"data": 8}, "tensor-8": {"data": 4, "tensor": 2},
    "pipeline-8": {"data": 4, "pipeline": 2}, "ddp-16": {"data": 16},
}  # fmt: skip
WRONG_CALLS = ("skip", "insert", "shape", "operation")
SMALL = {"small-ddp-4": 1, "small-pipeline-4": 4, "small-pipeline-8": 4}
LINES = ("line-ddp-4", "line-pipeline-4")
NAMES = (
    *(f"{shape} {fault}" for shape in SHAPES for fault in (*FAULTS, *WRONG_CALLS)),
    *(f"{shape} {fault}" for shape in SMALL for fault in FAULTS),
    *(f"{line} {fault}" for line in LINES for fault in FAULTS[:3]),
)
_STEPS, _ONSET = 90, 45


@cache
def run_named(name: str, seed: int) -> Run:
    """Return one of `NAMES`, drawn by a seed."""
    shape, _, fault = name.partition(" ")
    chance = random.Random(f"{name} {seed}")
    make: Callable[[str, str, random.Random], Run] = (
        _small if shape in SMALL else _line if shape in LINES else _large
    )
    return make(shape, fault, chance)


def _large(shape: str, fault: str, chance: random.Random) -> Run:
    job = jobs.Job(
        **SHAPES[shape], steps=_STEPS, seed=chance.randrange(1 << 30), microbatches=2,
        forward_ms=200.0, transfer_ms=2.0, ranks_per_host=4, tells_numbers=True,
        backend=chance.choice(("nccl", "gloo")),
        noise=jobs.Noise(sigma=chance.uniform(0.01, 0.03), clock_offset_ms=5.0),
    )  # fmt: skip
    rank = chance.randrange(job.num_ranks)
    planted = ()
    if fault != "clean":
        planted = (jobs.Fault(
            fault, rank, _ONSET if fault not in ("hang", "crash") else _STEPS - 5,  # type: ignore[arg-type]
            steps=1 if fault in WRONG_CALLS else jobs.ALWAYS, size=chance.uniform(0.5, 1.0),
            point=chance.choice(("data", "forward", "backward")), bucket=chance.randrange(3),
        ),)  # fmt: skip
    recording = Recording(dataclasses.replace(job, faults=planted))
    items = list(recording.items())
    stopped = recording.stopped_ms()
    looks = (stopped * 0.7, stopped + 1.0, stopped + SILENCE_MS)
    for at_ms in looks[1:]:
        items += recording.states(at_ms)
    guilty = frozenset({rank}) if planted else frozenset()
    return _run(f"{shape} {fault}", items, looks, guilty, job.num_ranks, _STEPS)


def _small(shape: str, fault: str, chance: random.Random) -> Run:
    ranks = int(shape[-1])
    rank = chance.randrange(ranks)
    planted = ()
    if fault != "clean":
        start = _ONSET if fault.startswith("slow") else _STEPS - 5
        planted = (simulator.Fault(fault, rank, start, chance.uniform(0.5, 1.0)),)  # type: ignore[arg-type]
    recording = simulator.record(simulator.Job(
        num_ranks=ranks, num_stages=SMALL[shape], steps=_STEPS, step_ms=500.0,
        noise=simulator.CALM, faults=planted, seed=chance.randrange(1 << 30),
        num_hosts=chance.choice((1, 2)),
    ))  # fmt: skip
    items = recording.items()
    looks = (recording.last_ms * 0.7, recording.last_ms + 1.0, recording.last_ms + SILENCE_MS)
    for at_ms in looks:
        items += recording.states(at_ms)
    if fault == "crash":
        items += _crash(recording, rank)
    guilty = frozenset({rank}) if planted else frozenset()
    return _run(f"{shape} {fault}", items, looks, guilty, ranks, _STEPS)


def _crash(recording: simulator.Recording, rank: int) -> list[Item]:
    """Return what a rank that raises says, and those who lose it."""
    at_ms = recording.machine.ranks[rank].raised_ms
    found: list[Item] = []
    for other in range(recording.job.num_ranks):
        late = at_ms if other == rank else at_ms + 150.0 + other
        now = recording.clock_ns(other, late)
        message = "division by zero" if other == rank else "Connection closed by peer [10.0.0.7]"
        who = {"attempt": 0, "rank": other, "time_ns": now}
        error = schema.ErrorRaised(
            **who, type="RuntimeError", message=message, step=_STEPS - 5,
            where="main" if other == rank else "collective",
        )  # fmt: skip
        end = schema.RankEnded(**(who | {"time_ns": now + 200 * MS}), reason="exception",
                               exit_code=1, last_step=_STEPS - 6)  # fmt: skip
        arrival = START_NS + int(late * MS)
        found += [(arrival, error), (arrival + 200 * MS, end)]
    return found


def _line(shape: str, fault: str, chance: random.Random) -> Run:
    """Return a job whose single waits are known, so that its steps can be replayed."""
    ranks, steps = 4, _STEPS
    factor = timeline.noisy(chance.randrange(1 << 30), ranks, steps, 0.02)
    rank, slow = chance.randrange(ranks), np.zeros((ranks, steps + 1))
    if fault != "clean":
        slow[rank, _ONSET:] = chance.uniform(0.5, 1.0)
    at_work = slow if fault == "slow_compute" else np.zeros_like(slow)
    stages = 4 if "pipeline" in shape else 1
    if stages > 1:
        program = timeline.pipeline(
            stages, 4, "gpipe", lambda r, s: 40.0 * (factor[r, s] + at_work[r, s]), 1.0
        )
        groups = timeline.groups_of(stages, 1)
    else:
        program = timeline.data_parallel(
            150.0, 300.0, 4, 5.0, lambda r, s: float(factor[r, s] + at_work[r, s])
        )
        groups = {"world": tuple(range(ranks))}

    def with_data(r: int, step: int) -> Sequence[timeline.Act]:
        wait = 450.0 * slow[r, step] if fault == "slow_data" else 0.0
        return [timeline.Act("compute", 0.1 + wait, "data"), *program(r, step)]

    line = timeline.Timeline(ranks, steps, with_data, groups).run()
    counts = {(one.number, event.step): 0 for one in line.ranks for event in one.events}
    for one in line.ranks:
        for event in one.events:
            counts[one.number, event.step] += 1
    items = line.items(
        hosts=2, stages=list(range(stages)) if stages > 1 else (),
        extra=lambda r, s: {"num_collectives": counts.get((r, s), 0)},
    )  # fmt: skip
    last_ms = max(log["ended"] for one in line.ranks for log in one.steps)
    guilty = frozenset({rank}) if fault != "clean" else frozenset()
    return _run(f"{shape} {fault}", [*items, *_at_the_end(line, last_ms)],
                (last_ms * 0.7, last_ms + 1.0), guilty, ranks, steps)  # fmt: skip


def _at_the_end(line: timeline.Timeline, last_ms: float) -> list[Item]:
    """Return the states of ranks that are through with all steps."""
    now = START_NS + int(last_ms * MS)
    found: list[Item] = []
    for rank in line.ranks:
        groups = []
        for name, members in line.groups.items():
            count = max((e.sequence for e in rank.events if e.act.group == name and e.act.peer < 0),
                        default=0)  # fmt: skip
            if rank.number in members:
                groups.append(schema.GroupState(group=name, issued=count, ended=count))
        found.append((now, schema.RankState(
            attempt=0, rank=rank.number, time_ns=now, step=int(rank.steps[-1]["step"]),
            phase="other", phase_since_ns=now, heartbeat_ns=now, groups=groups,
        )))  # fmt: skip
    return found


def _run(
    name: str, items: list[Item], looks: tuple[float, ...], guilty: frozenset[int], ranks: int,
    steps: int,
) -> Run:  # fmt: skip
    items.sort(key=lambda item: item[0])
    return Run(name, tuple(items), looks, guilty, ranks, steps)


# --- judging ------------------------------------------------------------------------------------


def look_at(run: Run, drops: Sequence[Drop]) -> list[Look]:
    """Give an analysis what is left, in order of arrival, and look on the way and at the end."""
    state, found = RunState("missing"), []
    items, begin = left_of(run.items, drops), 0
    for at_ms in run.looks_ms:
        now_ns, end = START_NS + int(at_ms * MS), begin
        is_last = at_ms == run.looks_ms[-1]
        while end < len(items) and (is_last or items[end][0] <= now_ns):
            end += 1
        apply(state, items[begin:end])
        begin = end
        found.append(state.look(now_ns))
    return found


@cache
def is_found(name: str, seed: int) -> bool:
    """Return whether the fault of a run is named where nothing is missing."""
    run = run_named(name, seed)
    verdict = look_at(run, ())[-1].verdict
    return verdict is not None and set(verdict.ranks) == run.guilty


def judged(name: str, seed: int, run_seed: int) -> Case:
    """Draw drops by a seed, and say what was said wrongly without what they took."""
    run = run_named(name, run_seed)
    drops = draw(random.Random(f"{name} {seed}"), run.num_ranks, run.num_steps)
    looks = look_at(run, drops)
    answer = looks[-1].answer
    wrong = _accused(run, looks) or _healthy(run, drops, looks[-1], is_found(name, run_seed))
    return Case(name, seed, tuple(drops), answer.state, answer.text, wrong)


def _accused(run: Run, looks: Sequence[Look]) -> str:
    """Return which healthy rank is accused, in any look."""
    for look in looks:
        for finding in (*look.findings, *([look.verdict] if look.verdict else [])):
            if finding.severity != "info" and not set(finding.ranks) <= run.guilty:
                return f"accuses {sorted(set(finding.ranks) - run.guilty)}: {finding.what}"
    return ""


def _healthy(run: Run, drops: Sequence[Drop], look: Look, was_found: bool) -> str:
    """Return why "healthy" is wrong."""
    if look.answer.state != "healthy":
        return ""
    said = look.answer.text
    if run.name.split()[1] not in WRONG_CALLS:  # all other faults show in thinned steps too
        said = re.sub(r"; the single collectives of [^;]* not known", "", said)
    if run.guilty and was_found and "not known" not in said:
        return "healthy, though a fault may be hidden by what is missing"
    if any(_is_substantial(run, drop) for drop in drops):
        return "healthy, though ranks are recorded unequally"
    return ""


def _is_substantial(run: Run, drop: Drop) -> bool:
    """Return whether steps or collectives of some ranks are missing that those of others have."""
    if drop.source not in (*BLIND, "calls", "whole", "steps", "everything"):
        return False
    if len(drop.ranks) == run.num_ranks and drop.source != "everything":
        return False  # all alike
    recent = range(max(1, run.num_steps - POLICY.recent_steps + 1), run.num_steps + 1)
    steps = recent if drop.whole_run else drop.steps & set(recent)
    return len(steps) > 0.5 * len(recent)
