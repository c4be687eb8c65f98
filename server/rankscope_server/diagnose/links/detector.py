"""A slow link, adapter, host or switch, by the groups and pairs that cross it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.links.slower_transfers import placed_transfers, slower_transfers
from rankscope_server.diagnose.shared.topology import Part, host_count, parts_crossed
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    DetectorResult,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import capital, percent_text, ranks_text, times_text
from rankscope_server.observe.components import Slow, locate, slow_groups
from rankscope_server.observe.deviation import usual_steps
from rankscope_server.observe.episodes import turning_point
from rankscope_server.observe.event_table import EventTable
from rankscope_server.observe.rank_cost import clipped_mean, step_times
from rankscope_server.observe.transfers import (
    Path,
    PathTimes,
    TransferKind,
    compared,
    transfer_times,
)
from rankscope_server.replay.replay_table import begin_of, usable_columns

# The members of each path, and the ms of its transfers.
_Measured: TypeAlias = tuple[dict[Path, tuple[int, ...]], dict[TransferKind, Array]]
_WALK = 4  # blocks, as far as a straggler's onset is walked back
_SURE_F1 = 0.95
_MAX_SHOWN = 6


class SlowLink:
    """Finds the link, adapter, host or switch that makes the transfers of some groups slow."""

    name: ClassVar[str] = "slow-link"
    finds: ClassVar[str] = (
        "The link, adapter, host or switch that makes the transfers of some groups slow"
    )
    needs: ClassVar[str] = (
        "steps and collectives; four groups or pairs of one kind, or TCP connections of ranks; of "
        "switches `SLURM_TOPOLOGY_ADDR`"
    )
    silent: ClassVar[str] = (
        "fewer than three of them cross a part; half of all are slow; two parts explain it alike: "
        "no place is named"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return which part of the network is slow, or that the place is not known."""
        policy = window.policy
        if window.world_size == 1:
            return skipped(self, "one rank sends nothing", "nothing to do")
        columns = _columns(window)
        if not window.replays.events.num_rows or len(columns) < policy.replay_min_steps:
            return skipped(
                self, "too few ended operations are recorded", "record collectives, or wait"
            )
        columns, (members, times) = _measured(window, columns)
        kinds = {
            path: ("pair" if isinstance(path, tuple) else len(ranks), host_count(window, ranks))
            for path, ranks in members.items()
        }
        by_path = compared(times, kinds, len(columns), policy)
        if not by_path:
            slower = slower_transfers(window)
            if slower is not None:
                return ran(self, [slower], note="too few groups to find the place")
            least, seen = policy.min_role_size, policy.link_min_operations
            return skipped(
                self,
                f"no {least} groups or pairs of one kind with more than {seen} operations",
                "a pairwise bandwidth check between hosts would show it: nccl-tests sendrecv_perf",
            )
        ratios = {path: one.ratio for path, one in by_path.items()}
        slow = slow_groups(ratios, kinds, policy)
        crossed, size = parts_crossed(window, {path: members[path] for path in by_path})
        verdict = locate(ratios, slow, crossed, size, kinds, policy)
        findings = [
            finding
            for component in verdict.found
            if (
                finding := _located(
                    window, component, by_path, members, crossed, times, columns, slow
                )
            )
        ]
        if verdict.unexplained and not verdict.why_silent.startswith("more than half"):
            paths = {path for path in by_path if path in verdict.unexplained}
            found = _found(window, paths, by_path, members, times, columns)
            if found.bound >= policy.cost_silent_ratio:
                findings.append(unknown_finding(window, found, verdict.why_silent))
        if not any(finding.ranks for finding in findings):
            findings = placed_transfers(window) or findings
        checked = f"transfers of {len(by_path)} groups and pairs: none stands out of its kind"
        note = verdict.why_silent if slow and not findings else ""
        return ran(self, findings, () if slow or findings else (checked,), note)


def _columns(window: Window) -> Array:
    """Return the columns of the newest whole block of steps, without special steps."""
    steps, size = window.steps, window.policy.link_steps
    # half a block aside of those of replays: both at once would take seconds of many ranks
    total = steps.num_steps + steps.dropped_steps + size // 2
    stop = max(0, steps.num_steps - total % window.replays.paced(size // 4, size, steps))
    return usable_columns(steps, begin_of(steps, stop, size), stop, window.policy)


def _measured(window: Window, columns: Array) -> tuple[Array, _Measured]:
    """Return the members of every path, its transfers in some columns, and in which.

    In these, or in those of the look before while these are deferred (`ReplayTable.latest`).
    """
    groups = {name: ranks for (_, name), ranks in window.groups.items()}

    def prepare(columns: Array) -> Callable[[], _Measured]:
        events = window.replays.events.snapshot()
        return partial(_transfers, events, window.steps.steps[columns], groups)

    return window.replays.latest("transfers", columns, window.steps, len(window.groups), prepare)


def _transfers(
    events: EventTable, numbers: Array, groups: Mapping[str, tuple[int, ...]]
) -> _Measured:
    sizes = {name: len(ranks) for name, ranks in groups.items()}
    times = transfer_times(events, events.select(numbers), sizes)
    paths = dict.fromkeys(call.path for call in times)
    return {path: path if isinstance(path, tuple) else groups[path] for path in paths}, times


def _located(
    window: Window,
    one: Slow,
    by_path: Mapping[Path, PathTimes],
    members: Mapping[Path, tuple[int, ...]],
    crossed: Mapping[Part, set[Path]],
    times: Mapping[TransferKind, Array],
    columns: Array,
    slow: set[Path],
) -> Finding | None:
    part = one.component
    assert isinstance(part, Part)
    mine = crossed[part] & slow
    found = _found(window, mine, by_path, members, times, columns)
    if found.bound < window.policy.cost_silent_ratio:
        return None
    others = set(by_path) - crossed[part]
    return located_finding(window, part, one, found, (len(others & slow), len(others)))


def _found(
    window: Window,
    paths: set[Path],
    by_path: Mapping[Path, PathTimes],
    members: Mapping[Path, tuple[int, ...]],
    times: Mapping[TransferKind, Array],
    columns: Array,
) -> Found:
    """Return what slow paths cost, and since when they are slow.

    At most what the transfers of the rank that has most of them take longer in a step, and never
    more than such ranks wait, where that is known. How much of it hides behind other work is known
    by the steps before the onset alone.
    """
    extra: dict[int, float] = {}
    for path in paths:
        for rank in members[path]:
            extra[rank] = extra.get(rank, 0.0) + by_path[path].extra_ms
    table = window.steps
    step_ms = float(np.nanmedian(table.get("duration")[:, columns]))
    lost_ms = max(extra.values(), default=0.0)
    rows = [table.row_of[rank] for rank in extra if rank in table.row_of]
    blocked = table.get("blocked")[rows][:, columns] if rows else np.zeros((0, 0))
    waited = median(blocked)  # NaN of a rank whose waits are not known
    if (waited > 0).any():
        lost_ms = min(lost_ms, float(np.nanmax(waited)))
    bound = min(1.0, lost_ms / step_ms)
    onset = _onset(paths, by_path, times, table.steps[columns])
    if onset is None:
        onset = _onset_before(window, paths, by_path, int(columns[-1]) + 1)
    cost = None if onset is None else _measured_cost(window, columns, onset, bound)
    return Found(paths, tuple(sorted(extra)), bound, cost, onset,
                 float(np.exp(np.median([by_path[path].ratio for path in paths]))),
                 sum(by_path[path].operations for path in paths))  # fmt: skip


def _measured_cost(window: Window, columns: Array, onset: int, bound: float) -> float | None:
    """Return by how much the job's steps are slower than before; None without steps before."""
    table, policy = window.steps, window.policy
    usual = usual_steps(table, policy) & (table.steps < onset)
    before = np.flatnonzero(usual)[-policy.healthy_long_steps :]
    if len(before) < policy.healthy_min_steps:
        return None
    now = columns[columns >= int(np.searchsorted(table.steps, onset))]
    means = [clipped_mean(step_times(table, part)) for part in (before, now)]
    return float(np.clip(throughput_loss(means[1], means[0]), 0.0, bound))


def _onset_before(
    window: Window, paths: set[Path], by_path: Mapping[Path, PathTimes], stop: int
) -> int | None:
    """Return the onset before the newest block: an earlier look's, or what is seen further back.

    The walk back takes the blocks that looks on the way would have taken, so that one late look
    says the same; operations of long ago are gone, and it ends there.
    """
    for old in window.before.values():
        if old.kind == "slow_link" and {path_text(path) for path in paths} & {
            fact.text for fact in old.evidence
        }:
            return old.onset_step
    size, events = window.policy.link_steps, window.replays.events
    sizes = {name: len(ranks) for (_, name), ranks in window.groups.items()}
    for end in range(stop - size // 4, max(size, stop - _WALK * size) - 1, -(size // 4)):
        begin = begin_of(window.steps, end, size)
        columns = usable_columns(window.steps, begin, end, window.policy)
        numbers = window.steps.steps[columns]
        if not len(columns) or not events.count(numbers):
            return None
        times = transfer_times(events, events.select(numbers), sizes)
        if not any(call.path in paths for call in times):
            return None
        onset = _onset(paths, by_path, times, numbers)
        if onset is not None:
            return onset
    return None


def _onset(
    paths: set[Path],
    by_path: Mapping[Path, PathTimes],
    times: Mapping[TransferKind, Array],
    steps: Array,
) -> int | None:
    """Return the first slow step; None where the transfers were slow from the first one on."""
    grid = np.linspace(0.0, 1.0, len(steps))  # a path may have several transfers in a step
    level = np.mean(
        [
            np.interp(grid, np.linspace(0.0, 1.0, len(one)), np.log(one))
            for call, one in times.items()
            if call.path in paths
        ],
        axis=0,
    )
    size = float(np.median([by_path[path].ratio for path in paths]))
    usual = float(np.median(level[len(steps) // 2 :])) - size
    at = turning_point(level, usual, usual + size)
    if at <= 1 or np.median(level[:at]) > usual + size / 2:
        return None
    return int(steps[at])


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
    window: Window, part: Part, slow: Slow, found: Found, others: tuple[int, int]
) -> Finding:
    """Return the finding about a part of the network; `others` are (slow, all) paths beside it."""
    ranks = tuple(sorted(r for r in window.ranks if window.host(r) in part.hosts))
    ranks = (int(part.name.removeprefix("rank ")),) if part.level == 0 else ranks
    confidence = 0.8 if slow.f1 >= _SURE_F1 else 0.65
    since = f" since step {found.onset_step:,}" if found.onset_step else ""
    return window.finding(
        "slow_link",
        f"{part.level}/{part.name}",
        severity=_severity(window, found),
        ranks=ranks,
        hosts=part.hosts,
        onset_step=found.onset_step,
        cost=found.cost,
        what=f"{capital(_part_text(window, part))} is slow{since}",
        why=f"{slow.slow} of {slow.crossing} groups and pairs that cross it take "
        f"{times_text(slow.ratio)} the median of their kind, {others[0]} of {others[1]} others do; "
        f"{_cost_text(found)}",
        next=f"Run the pairwise bandwidth check {_where(part)} while the job is stopped, and take "
        "the part out of use if it confirms",
        command="mpirun -H HOST_A,HOST_B -N 1 sendrecv_perf -b 64M -e 64M  # nccl-tests",
        confidence=(
            confidence,
            "no other part of the network is crossed by the same slow groups (F1 "
            f"{slow.f1:.2f}); counters of the part itself are not known",
        ),
        evidence=(
            *(path_text(path) for path in sorted(found.paths, key=str)[:_MAX_SHOWN]),
            f"{found.operations:,} transfers, of each the time of the last to arrive",
        ),
        ruled_out=(
            "Ranks that come late: the last to arrive waits least, and its time is taken",
            "Clocks that differ: no times of two hosts are compared",
        ),
        disproof="The same groups are slow by design, or a bandwidth check of the part "
        "reaches what the others reach",
        victims=tuple(rank for rank in found.ranks if rank not in ranks),
    )


def unknown_finding(window: Window, found: Found, why: str) -> Finding:
    """Return the finding that communication is slow at a place that the groups do not show."""
    first, second = found.ranks[: len(found.ranks) // 2], found.ranks[len(found.ranks) // 2 :]
    return window.finding(
        "slow_link",
        "unknown",
        severity="info",
        onset_step=found.onset_step,
        cost=found.cost,
        what=f"Transfers of {len(found.paths)} groups or pairs are slow, the place is not known",
        why=f"They take {times_text(found.ratio)} the median of their kind; {_cost_text(found)}; "
        f"{why}",
        next=f"Measure pairs of hosts between {ranks_text(first)} and {ranks_text(second)}, then "
        "halve the slow half: that decides which part it is",
        command="mpirun -H HOST_A,HOST_B -N 1 sendrecv_perf -b 64M -e 64M  # nccl-tests",
        confidence=(
            0.5,
            "what is slow is measured, but not where: groups that cross several parts alike",
        ),
        evidence=tuple(path_text(path) for path in sorted(found.paths, key=str)[:_MAX_SHOWN]),
        ruled_out=("Ranks that come late: the last to arrive waits least, and its time is taken",),
        disproof="The same groups are slow by design",
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
    return severity_of_cost(found.cost, policy)


def _cost_text(found: Found) -> str:
    if found.cost is None:
        return (
            f"that takes at most {percent_text(found.bound)} of the job's throughput, less where "
            "other work hides it; no steps before it show how much"
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
        return f"the path from {part.name}"
    if part.level == 2:
        return f"the network of {part.name}"
    return f"switch {part.name}"


def _where(part: Part) -> str:
    if part.level == 1:
        return f"between {part.hosts[0]} and {part.hosts[1]}"
    if len(part.hosts) == 1:
        return f"between {part.hosts[0]} and another host"
    return f"between hosts under it ({', '.join(part.hosts[:4])}) and others"
