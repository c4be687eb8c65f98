"""Runs one case through the analysis of the server, and judges what it says against the truth."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.score.cases import Case
from tests.simulator.delivery import apply, deliver
from tests.simulator.engine import Engine
from tests.simulator.job import Job
from tests.simulator.records import MS, START_NS, Item, Recording

SILENCE_MS = 14_000.0  # looked at so long after the last move: a hang must be named by then
PATIENCE_STEPS = 4.0  # or after so many steps: three are waited for before anybody is suspected
LOOK_EVERY_MS = 1000.0  # in the end, after which a hang is looked for each second
PER_CHUNK = 5
_LOOKS = (np.arange(0.45, 1.01, 0.05).tolist(), [0.7, 1.0])  # shares of a run; of a large one


@dataclass(slots=True)
class Outcome:
    """What became of one case. Times in seconds, shares 0-1, None where it does not apply."""

    diagnosis: str
    num_ranks: int
    seed: int
    planted: int = 0  # faults that cost something, or that never cost
    found: int = 0  # of them, with the right kind and exactly the right ranks
    right: int = 0  # findings above info that a fault explains
    wrong: int = 0  # findings above info that none does: false alarms
    was_silent: bool = False
    accused: tuple[int, ...] = ()  # healthy ranks that a finding above info names
    named_after_s: float | None = None
    cost: float | None = None
    cost_truth: float | None = None
    rank_hours: float = 0.0
    num_guilty: int = 0  # ranks at fault; of a job that stopped those that stopped
    said: list[str] = field(default_factory=list)  # kept where something is missed or false
    # how many ranks the rules of others name, and how many of these are healthy
    baselines: dict[str, tuple[int, int]] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def is_missed(self) -> bool:
        """Return whether a fault was not found, or something said that is false."""
        return bool(self.found < self.planted or self.wrong or self.accused)


def run(case: Case) -> tuple[Outcome, RunState, Recording]:
    """Simulate, deliver as a network would, look on the way and at the end, and judge."""
    job, needs = case.job, case.diagnosis.needs
    recording = Recording(job, collectives="calls" in needs)
    state = RunState("scored")
    items = deliver(recording.items(PER_CHUNK), case.seed, lost=0.002, late=0.02)
    outcome = Outcome(case.diagnosis.name, job.num_ranks, case.seed)
    truths = {id(fault): _truth(case, at) for at, fault in enumerate(job.faults)}
    first_seen: dict[int, float] = {}
    stopped_ms = recording.stopped_ms()
    for until_ms, part in _blocks(items, recording, job):
        apply(state, part)
        apply(state, recording.states(until_ms) if until_ms > stopped_ms else [])
        look = state.look(START_NS + int(until_ms * MS))
        for at, (fault, kinds, ranks) in enumerate(case.truth):
            if any(_tells(case, f, kinds, ranks) for f in look.findings):
                first_seen.setdefault(at, until_ms - recording.began_ms.get(fault.start, 0.0))
            else:
                first_seen.pop(at, None)
    _judge(case, look.findings, outcome)
    outcome.rank_hours = job.num_ranks * stopped_ms / 3.6e6
    if first_seen:
        outcome.named_after_s = max(first_seen.values()) / 1e3
    outcome.cost_truth = max((t for t in truths.values() if t is not None), default=None)
    return outcome, state, recording


def _blocks(items: list[Item], recording: Recording, job: Job) -> list[tuple[float, list[Item]]]:
    """Return what came between two looks, until long after the last move."""
    stopped_ms = recording.stopped_ms()
    step_ms = stopped_ms / max(1, len(recording.began_ms))
    stop_at = stopped_ms + max(SILENCE_MS, PATIENCE_STEPS * step_ms)
    moments = [stopped_ms * share for share in _LOOKS[job.num_ranks > 64]]
    if any(fault.kind in ("hang", "crash") for fault in job.faults):
        moments += np.arange(stopped_ms + LOOK_EVERY_MS, stop_at, LOOK_EVERY_MS).tolist()
    moments.append(stop_at)
    found, begin = [], 0
    for moment in moments:
        end = begin
        while end < len(items) and (
            items[end][0] <= START_NS + int(moment * MS) or moment == moments[-1]
        ):
            end += 1
        found.append((moment, items[begin:end]))
        begin = end
    return found


def _tells(case: Case, finding: Finding, kinds: frozenset[str], ranks: frozenset[int]) -> bool:
    """Return whether a finding names the fault: its kind, and exactly its ranks (or hosts)."""
    if finding.kind not in kinds:
        return False
    if finding.severity == "info" and not case.diagnosis.counts_info:
        return False
    if not case.diagnosis.names_ranks:
        return True
    if finding.kind == "nan" and case.job.pipeline > 1 and not finding.ranks:
        return True  # the last stage shows what any stage brought in: nobody may be named
    if finding.kind == "clock_offset":
        return set(finding.hosts) == {case.job.host(rank) for rank in ranks}
    return set(finding.ranks) == set(ranks)


def _judge(case: Case, findings: list[Finding], outcome: Outcome) -> None:
    loud = [f for f in findings if f.severity != "info" and f.explained_by is None]
    guilty = {rank for _, _, ranks in case.truth for rank in ranks}
    for at, (_, kinds, ranks) in enumerate(case.truth):
        cost = _truth(case, at)
        if cost is not None and cost < 0.02:
            continue  # nobody has to find what costs nothing
        outcome.planted += 1
        told = [f for f in findings if _tells(case, f, kinds, ranks)]
        outcome.found += bool(told)
        costs = [f.cost_throughput_ratio for f in told if f.cost_throughput_ratio is not None]
        if costs and cost is not None:
            outcome.cost = max(costs)
    for finding in loud:
        is_right = any(
            finding.kind in kinds and (not case.diagnosis.names_ranks
                                       or _tells(case, finding, kinds, ranks))
            for _, kinds, ranks in case.truth
        )  # fmt: skip
        outcome.right += is_right
        outcome.wrong += not is_right
    accused = {rank for finding in loud for rank in finding.ranks} - guilty
    outcome.accused = tuple(sorted(accused)) if case.diagnosis.names_ranks else ()
    outcome.was_silent = outcome.planted > 0 and not loud and not outcome.found
    if outcome.is_missed:
        outcome.said = [f"{f.kind} {f.severity} {list(f.ranks)[:4]}" for f in findings]


def _truth(case: Case, at: int) -> float | None:
    """Return what a fault takes of the throughput from its onset on; None where it takes none.

    The same job with the same seed runs with this fault alone, and without any.
    """
    fault, job = case.job.faults[at], case.job
    if not (fault.kind in _COSTS or fault.kind.startswith("slow_")):
        return None
    key = repr((job, at))
    if key not in _KNOWN:
        alone = dataclasses.replace(job, faults=(fault,))
        with_ms, without_ms = (mean_step_ms(one, fault.start) for one in (alone,
                               job.without_faults()))  # fmt: skip
        _KNOWN[key] = 1 - without_ms / with_ms
    return _KNOWN[key]


_COSTS = frozenset({"contention", "garbage", "thermal", "page_cache"})
_KNOWN: dict[str, float] = {}


def mean_step_ms(job: Job, first: int) -> float:
    """Return the mean step of a job from one step on, ms."""
    begin, end, count = math.nan, math.nan, 0
    for step in Engine(job).steps():
        if step.number == first:
            begin = float(step.started.max())
        if step.number >= first:
            end, count = float(step.ended.max()), count + 1
    return (end - begin) / count
