"""Steps that wait for data on all ranks, or now and then on one, and why.

A rank that always waits longer than its peers is the straggler detector's; here it is the loader
that all ranks share, or waits that come in a pattern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope_server.diagnose.data.loading_words import finding_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import NOT_HERE, DetectorResult, ran, skipped
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import median
from rankscope_server.observe.deviation import warmup_columns

Array = NDArray[Any]
Cause: TypeAlias = Literal[
    "no workers", "preprocessing", "fetch", "unknown", "slow worker", "under-prefetch",
    "epoch start", "bad shard",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loader:
    """What decides how long a step waits: of the loader with most workers."""

    workers: int
    prefetch: int
    persistent: bool


@dataclass(frozen=True, slots=True)
class Pattern:
    """Steps whose wait stands far out, and how they follow each other."""

    steps: tuple[int, ...]
    every: int  # 0: at no even distance


@dataclass(frozen=True, slots=True)
class Stall:
    """What waiting for data costs, and where it comes from."""

    lost: float  # share of the step that would be gone without waiting for data
    share: float  # of the median rank's step
    cause: Cause
    ranks: tuple[int, ...]  # empty: all
    pattern: Pattern | None
    loader: Loader | None
    step_ms: float
    wait_ms: float
    busy_cores: float | None
    iowait: float | None
    num_cpus: int
    first_step: int
    num_steps: int
    range: tuple[float, float]  # of what is lost in a step: least and most
    is_short: bool  # too few steps for more than that range


class DataLoading:
    """Finds steps that wait for their batch, and what the loader lacks."""

    name: ClassVar[str] = "data-loading"
    kinds: ClassVar[tuple[str, ...]] = ("slow_data", "slow_epoch_start", "bad_shard")
    needs: ClassVar[frozenset[str]] = frozenset({"steps"})

    def look(self, window: Window) -> DetectorResult:
        """Return whether the job waits for data."""
        table, policy = window.steps, window.policy
        steps = table.num_steps + table.dropped_steps
        least = policy.short_steps if window.facts.is_recording else policy.min_steps
        if steps < least:
            return skipped(self, f"needs {least} steps, has {steps}", "wait")
        stall = stall_of(window)
        if stall is None:
            return skipped(
                self, "too few normal steps among the newest", "see the losses under coverage"
            )
        if window.facts.is_recording and not np.nansum(table.get("data")) > 0:
            return skipped(self, "it shows no loading of data", NOT_HERE)
        if stall.lost < policy.data_info_share:
            text = f"waiting for data: {100 * stall.lost:.1f} % of the step"
            return ran(self, checked=(text,))
        if stall.pattern is not None and len(stall.pattern.steps) < policy.data_min_spikes:
            at = ", ".join(f"{step:,}" for step in stall.pattern.steps)
            return ran(self, note=f"long waits for data only at step {at}")
        if stall.ranks and stall.pattern is None:
            return ran(self, note="one rank waits for data all the time: see the straggler")
        return ran(self, [finding_of(window, stall)])


def stall_of(window: Window) -> Stall | None:
    """Return what waiting for data costs in the newest steps; None for too few of them."""
    table, policy = window.steps, window.policy
    columns = _columns(window)
    if columns is None:
        return None
    own, data = (table.get(name)[:, columns] for name in ("own", "data"))
    if np.isnan(own).mean() > policy.max_missing_share:
        return None
    roles = _roles(window)
    saved = saved_ms(own, data, roles)
    some = table.some_rows()
    duration = table.get("duration")[some, columns]
    step = median(duration, 0)
    good = ~np.isnan(step) & ~np.isnan(saved)
    lost = float(np.sum(saved[good]) / max(np.sum(step[good]), 1e-9))
    each = saved[good] / np.maximum(step[good], 1e-9)
    rows = _guilty(own, data, roles, saved) if lost >= policy.data_info_share else None
    series = np.nanmax(np.nan_to_num(data if rows is None else data[rows]), axis=0)
    step_ms = float(np.median(step[good]))
    pattern = None
    if len(columns) >= policy.min_steps // 2:
        pattern = pattern_of(table.steps[columns], series, step_ms, policy)
    ranks = () if rows is None else tuple(sorted(table.ranks[row] for row in rows))
    loader = loader_of(window, ranks)
    busy, iowait, cpus = _host_load(window, ranks)
    cause = _cause(window, loader, pattern, ranks, busy, iowait)
    first = int(table.steps[columns[0]]) if pattern is None else pattern.steps[0]
    return Stall(
        lost, float(np.nanmean(median(data[some] / duration, 0))), cause, ranks, pattern,
        loader, step_ms, float(np.nanmean(series)), busy, iowait, cpus, first, len(columns),
        (float(each.min()), float(each.max())), len(columns) < policy.min_steps,
    )  # fmt: skip


def _columns(window: Window) -> Array | None:
    """Return the newest normal steps; None for too few of them.

    A recording of few steps begins long after a run's first steps, and shows a share all the same.
    """
    table, policy = window.steps, window.policy
    if window.facts.is_recording and table.num_steps < policy.min_steps:
        return np.arange(table.num_steps) if table.num_steps >= policy.short_steps else None
    special = table.special()
    if special.mean() > 0.5:
        special[:] = False
    if not table.dropped_steps:
        special[: warmup_columns(table.head("duration"), policy)] = True
    columns = np.flatnonzero(~special)[-policy.data_steps :]
    return columns if len(columns) >= policy.min_steps // 2 else None


def _roles(window: Window) -> list[object]:
    return [
        (known.role, known.stage) if (known := window.ranks.get(rank)) else ""
        for rank in window.steps.ranks
    ]


def saved_ms(own: Array, data: Array, roles: list[object]) -> Array:
    """Return what each step would be shorter without waiting for data, ranks x steps -> steps.

    The slowest of a role decides: a wait that fits into the time for which the rank would wait
    for a peer anyway is no loss. Of
    several roles the one that loses most counts; a pipeline may hide a part of it.
    """
    best = np.zeros(own.shape[1])
    for role in dict.fromkeys(roles):
        rows = np.array([other == role for other in roles])
        with_data = np.fmax.reduce(own[rows], axis=0)
        without = np.fmax.reduce(own[rows] - data[rows], axis=0)
        best = np.fmax(best, np.nan_to_num(with_data - without))
    return best


def _guilty(own: Array, data: Array, roles: list[object], saved: Array) -> list[int] | None:
    """Return the rows without whose waits most of the loss is gone, None if it takes many."""
    if len(own) < 2 or not saved.sum() > 0:
        return None
    order = np.argsort(np.nansum(data, axis=1))[::-1]
    most = max(1, len(own) // 4)
    healed = data.copy()
    typical = np.fmin.reduce(data, axis=0) if len(data) == 2 else median(data, 0)
    for count in (1 << power for power in range(most.bit_length())):
        rows = order[:count]
        healed[rows] = np.fmin(data[rows], typical)
        rest = saved_ms(own - data + healed, healed, roles)
        if rest.sum() <= 0.25 * saved.sum():
            excess = np.nansum(np.fmax(data[rows] - typical, 0.0), axis=1)
            return [int(row) for row in rows[excess >= 0.25 * excess.max()]]
    return None


def pattern_of(steps: Array, waits: Array, step_ms: float, policy: Policy) -> Pattern | None:
    """Return the steps that hold most of the waiting, None if it is spread over all steps."""
    level = max(5.0 * float(np.median(waits)), policy.data_spike_share * step_ms)
    spikes = np.flatnonzero(waits > level)
    if not len(spikes) or waits[spikes].sum() < 0.7 * waits.sum() or len(spikes) > len(waits) / 2:
        return None
    # A late batch may hold up the next ones too: what follows at once belongs to it.
    starts = spikes[np.concatenate([[True], np.diff(spikes) > 1])]
    at = steps[starts]
    gaps = np.diff(at)
    every = 0
    if len(gaps) >= 2:
        gap, count = Counter(gaps.tolist()).most_common(1)[0]
        near = np.abs(gaps - gap) <= max(1, 0.02 * gap)
        if near.mean() >= 0.75 and (count >= 2 or gap > 20):
            every = int(gap)
    return Pattern(tuple(int(step) for step in at), every)


def loader_of(window: Window, ranks: tuple[int, ...]) -> Loader | None:
    """Return the loader that feeds the training: of several the one with most workers."""
    facts = window.facts.loaders
    wanted = ranks or tuple(facts)
    found = [dict(one) for rank in wanted for one in facts.get(rank, ())]
    loaders = [
        Loader(_integer(one, "num_workers"), _integer(one, "prefetch_factor"),
               one.get("persistent_workers") == "True")
        for one in found
    ]  # fmt: skip
    return max(loaders, key=lambda one: (one.workers, one.prefetch), default=None)


def _integer(facts: Mapping[str, str], name: str) -> int:
    text = facts.get(name, "0")
    return int(text) if text.isdigit() else 0


def _host_load(window: Window, ranks: tuple[int, ...]) -> tuple[float | None, float | None, int]:
    """Return busy cores and share of time waiting for disks of the busiest host, and its cores."""
    machines = window.facts.machines
    hosts = window.hosts(ranks or tuple(window.ranks))
    best: tuple[float | None, float | None, int] = (None, None, 0)
    for host in hosts:
        user = machines.rate("host", (host, ""), "cpu_user_us_total")
        system = machines.rate("host", (host, ""), "cpu_system_us_total")
        iowait = machines.rate("host", (host, ""), "cpu_iowait_us_total")
        cpus = machines.newest("host", (host, ""), "num_cpus")
        if user is None or system is None or cpus is None:
            continue
        busy = (user + system) / 1e6 * cpus
        if best[0] is None or busy > best[0]:
            best = (busy, None if iowait is None else iowait / 1e6, int(cpus))
    return best


def _cause(
    window: Window,
    loader: Loader | None,
    pattern: Pattern | None,
    ranks: tuple[int, ...],
    busy: float | None,
    iowait: float | None,
) -> Cause:
    if pattern is not None:
        return _cause_of_pattern(loader, pattern, ranks)
    if loader is not None and loader.workers == 0:
        return "no workers"
    if iowait is not None and iowait > window.policy.iowait_share:
        return "fetch"
    if loader is None or busy is None:
        return "unknown"
    local = max((known.local_world_size for known in window.ranks.values()), default=1)
    full = busy >= window.policy.workers_busy_share * loader.workers * local
    return "preprocessing" if full else "unknown"


def _cause_of_pattern(loader: Loader | None, pattern: Pattern, ranks: tuple[int, ...]) -> Cause:
    workers = loader.workers if loader else 0
    batches = workers * max(loader.prefetch, 1) if loader else 0
    if workers > 1 and pattern.every == workers:
        return "slow worker"
    if workers and batches > workers and pattern.every == batches:
        return "under-prefetch"
    if pattern.every > max(2 * batches, 8):
        return "epoch start"
    return "bad shard" if ranks else "unknown"
