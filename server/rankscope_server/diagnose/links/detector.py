"""A slow link, adapter, host or switch, by the groups and pairs that cross it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.links.slower_transfers import placed_transfers, slower_transfers
from rankscope_server.diagnose.links.words import Found, located_finding, path_text, unknown_finding
from rankscope_server.diagnose.shared.topology import Part, host_count, parts_crossed
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.findings.statistics import median
from rankscope_server.observe.components import Slow, locate, slow_groups
from rankscope_server.observe.deviation import warmup_columns
from rankscope_server.observe.episodes import turning_point
from rankscope_server.observe.rank_cost import clipped_mean, step_times
from rankscope_server.observe.transfers import Call, Path, PathTimes, compared, transfer_times
from rankscope_server.replay.replay_table import begin_of, usable_columns

Array = NDArray[Any]
_WALK = 4  # blocks, as far as a straggler's onset is walked back


class SlowLink:
    """Finds the link, adapter, host or switch that makes the transfers of some groups slow."""

    name: ClassVar[str] = "slow-link"
    needs: ClassVar[frozenset[str]] = frozenset({"rank", "group", "collectives", "steps"})
    kinds: ClassVar[tuple[str, ...]] = ("slow_link",)

    def look(self, window: Window) -> DetectorResult:
        """Return which part of the network is slow, or that the place cannot be told."""
        policy = window.policy
        if window.world_size == 1:
            return skipped(self, "one rank sends nothing", "nothing to do")
        columns = _columns(window)
        if not window.replays.events.num_rows or len(columns) < policy.replay_min_steps:
            return skipped(
                self, "too few ended operations are recorded", "record collectives, or wait"
            )
        members, times = _measured(window, columns)
        kinds = {
            path: ("pair" if isinstance(path, tuple) else len(ranks), host_count(window, ranks))
            for path, ranks in members.items()
        }
        by_path = compared(times, kinds, len(columns), policy)
        if not by_path:
            slower = slower_transfers(window)
            if slower is not None:
                return ran(self, [slower], note="too few groups to tell the place")
            least, seen = policy.min_role_size, policy.link_min_operations
            return skipped(
                self,
                f"no {least} groups or pairs of one kind with more than {seen} operations",
                "a pairwise bandwidth check between hosts would tell: nccl-tests sendrecv_perf",
            )
        ratios = {path: one.ratio for path, one in by_path.items()}
        slow = slow_groups(ratios, kinds, policy)
        crossed, size = parts_crossed(window, {path: members[path] for path in by_path})
        verdict = locate(ratios, slow, crossed, size, kinds, policy)
        findings = [
            finding
            for one in verdict.found
            if (finding := _located(window, one, by_path, members, crossed, times, columns, slow))
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
    total = steps.num_steps + steps.dropped_steps
    stop = steps.num_steps - total % (size // 4)
    return usable_columns(steps, begin_of(steps, stop, size), stop, window.policy)


def _measured(
    window: Window, columns: Array
) -> tuple[dict[Path, tuple[int, ...]], dict[Call, Array]]:
    """Return the members of every path, and its transfers in some steps; kept until more come."""
    events, numbers = window.replays.events, window.steps.steps[columns]
    rests_on = ("transfers", numbers.tobytes(), events.count(numbers), len(window.groups))
    kept = window.replays.kept
    if rests_on not in kept:
        for old in [key for key in kept if isinstance(key, tuple) and key[0] == "transfers"]:
            del kept[old]
        groups = {name: ranks for (_, name), ranks in window.groups.items()}
        sizes = {name: len(ranks) for name, ranks in groups.items()}
        times = transfer_times(events, events.select(numbers), sizes)
        paths = dict.fromkeys(call.path for call in times)
        members = {path: path if isinstance(path, tuple) else groups[path] for path in paths}
        kept[rests_on] = members, times
    found: tuple[dict[Path, tuple[int, ...]], dict[Call, Array]] = kept[rests_on]
    return found


def _located(
    window: Window,
    one: Slow,
    by_path: Mapping[Path, PathTimes],
    members: Mapping[Path, tuple[int, ...]],
    crossed: Mapping[Part, set[Path]],
    times: Mapping[Call, Array],
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
    times: Mapping[Call, Array],
    columns: Array,
) -> Found:
    """Return what slow paths cost, and since when they are slow.

    At most what the transfers of the rank that has most of them take longer in a step, and never
    more than such ranks wait, where that is known. How much of it hides behind other work is told
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
    usual = ~table.special() & (table.steps < onset)
    if not table.dropped_steps:
        usual[: warmup_columns(table.head("duration"), policy)] = False
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
            one.text for one in old.evidence
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
    times: Mapping[Call, Array],
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
