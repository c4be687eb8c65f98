"""What the detector of slow links says."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.shared.topology import Part
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.severity import severity_of
from rankscope_server.findings.text import (
    capital,
    confidence_word,
    percent_text,
    ranks_text,
    times_text,
)
from rankscope_server.observe.components import Slow
from rankscope_server.observe.transfers import Path

_SURE_F1 = 0.95
_MAX_TOLD = 6


@dataclass(frozen=True, slots=True)
class Found:
    """Slow paths: who is at their ends, what they cost, since when, how slow."""

    paths: set[Path]
    ranks: tuple[int, ...]
    bound: float  # no more than this share of throughput
    cost: float | None  # measured against the steps before
    onset_step: int | None
    ratio: float
    operations: int


def located_finding(
    window: Window, part: Part, one: Slow, found: Found, others: tuple[int, int]
) -> Finding:
    """Return the finding about a part of the network; `others` are (slow, all) paths beside it."""
    ranks = tuple(sorted(r for r in window.ranks if window.host(r) in part.hosts))
    ranks = (int(part.name.removeprefix("rank ")),) if part.level == 0 else ranks
    confidence = 0.8 if one.f1 >= _SURE_F1 else 0.65
    since = f" since step {found.onset_step:,}" if found.onset_step else ""
    return Finding(
        key=f"{window.attempt}/slow-link/{part.level}/{part.name}",
        detector="slow-link",
        kind="slow_link",
        severity=_severity(window, found),
        attempt=window.attempt,
        ranks=ranks,
        hosts=part.hosts,
        onset_step=found.onset_step,
        onset_ms=window.time_ms(found.onset_step) if found.onset_step else None,
        cost_throughput_ratio=found.cost,
        cost_rank_hours_per_day=_rank_hours(window, found),
        what=f"{capital(_part_text(window, part))} is slow{since}",
        why=f"{one.slow} of {one.crossing} groups and pairs that cross it take "
        f"{times_text(one.ratio)} the median of their kind, {others[0]} of {others[1]} others do; "
        f"{_cost_text(found)}",
        next=f"Run the pairwise bandwidth check {_where(part)} while the job stands, and take "
        "the part out of use if it confirms",
        next_command="mpirun -H HOST_A,HOST_B -N 1 sendrecv_perf -b 64M -e 64M  # nccl-tests",
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: no other part of the network is crossed "
        f"by the same slow groups (F1 {one.f1:.2f}); counters of the part itself are not known",
        evidence=(
            *(Evidence(path_text(path)) for path in sorted(found.paths, key=str)[:_MAX_TOLD]),
            Evidence(f"{found.operations:,} transfers, of each the time of the last to arrive"),
        ),
        ruled_out=(
            "Ranks that come late: the last to arrive waits least, and its time is taken",
            "Clocks that differ: no times of two hosts are compared",
        ),
        would_be_wrong_if="The same groups are slow by design, or a bandwidth check of the part "
        "reaches what the others reach",
        policy_hash=window.policy.hash,
        victims=tuple(rank for rank in found.ranks if rank not in ranks),
    )


def unknown_finding(window: Window, found: Found, why: str) -> Finding:
    """Return the finding that communication is slow at no place that the groups tell."""
    first, second = found.ranks[: len(found.ranks) // 2], found.ranks[len(found.ranks) // 2 :]
    return Finding(
        key=f"{window.attempt}/slow-link/unknown",
        detector="slow-link",
        kind="slow_link",
        severity="info",  # nobody is accused, and who is to look where is not known
        attempt=window.attempt,
        onset_step=found.onset_step,
        onset_ms=window.time_ms(found.onset_step) if found.onset_step else None,
        cost_throughput_ratio=found.cost,
        cost_rank_hours_per_day=_rank_hours(window, found),
        what=f"Transfers of {len(found.paths)} groups or pairs are slow, the place is not known",
        why=f"They take {times_text(found.ratio)} the median of their kind; {_cost_text(found)}; "
        f"{why}",
        next=f"Measure pairs of hosts between {ranks_text(first)} and {ranks_text(second)}, then "
        "halve the slow half: that decides which part it is",
        next_command="mpirun -H HOST_A,HOST_B -N 1 sendrecv_perf -b 64M -e 64M  # nccl-tests",
        confidence=0.5,
        confidence_text="low: what is slow is measured, where it lies cannot be told from groups "
        "that cross several parts alike",
        evidence=tuple(
            Evidence(path_text(path)) for path in sorted(found.paths, key=str)[:_MAX_TOLD]
        ),
        ruled_out=("Ranks that come late: the last to arrive waits least, and its time is taken",),
        would_be_wrong_if="The same groups are slow by design",
        policy_hash=window.policy.hash,
        victims=found.ranks,
    )


def path_text(path: Path) -> str:
    """Return how a path is called."""
    if isinstance(path, tuple):
        return f"From rank {path[0]} to rank {path[1]}"
    return f"Group {path}"


def _severity(window: Window, found: Found) -> Severity:
    """Return how bad it is; what is not measured against steps before is no more than a warning."""
    policy = window.policy
    if found.cost is None:
        return "warning" if found.bound >= policy.cost_info_ratio else "info"
    return severity_of(found.cost, policy)


def _rank_hours(window: Window, found: Found) -> float | None:
    return None if found.cost is None else rank_hours_per_day(window.world_size, found.cost)


def _cost_text(found: Found) -> str:
    if found.cost is None:
        return (
            f"that takes at most {percent_text(found.bound)} of the job's throughput, less where "
            "other work hides it; no steps before it tell how much"
        )
    return (
        f"steps are {percent_text(found.cost)} of throughput slower than before, of which the "
        f"transfers explain up to {percent_text(found.bound)}"
    )


def _part_text(window: Window, part: Part) -> str:
    if part.level == 0:
        rank = int(part.name.removeprefix("rank "))
        return f"the network adapter of rank {rank} ({window.host(rank) or 'its host'})"
    if part.level == 1:
        return f"the way from {part.name}"
    if part.level == 2:
        return f"the network of {part.name}"
    return f"switch {part.name}"


def _where(part: Part) -> str:
    if part.level == 1:
        return f"between {part.hosts[0]} and {part.hosts[1]}"
    if len(part.hosts) == 1:
        return f"between {part.hosts[0]} and another host"
    return f"between hosts under it ({', '.join(part.hosts[:4])}) and others"
