"""Steps that wait for data on all ranks, or now and then on one, and why.

A rank that always waits longer than its peers is the straggler detector's; here it is the loader
that all ranks share, or waits that come in a pattern.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Evidence,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import ms_text, percent_text
from rankscope_server.observe.data_passes import MAX_PASSES
from rankscope_server.observe.deviation import usual_steps

Cause: TypeAlias = Literal[
    "no workers", "preprocessing", "fetch", "unknown", "slow worker", "under-prefetch",
    "epoch start", "bad shard",
]  # fmt: skip
Epochs: TypeAlias = Literal["there", "elsewhere", "unknown"]  # whether they begin with the waits
_SAID_AFTER = 4  # steps of a pass, until its first batches are known
_KINDS = {"epoch start": "slow_epoch_start", "bad shard": "bad_shard", "slow worker": "bad_shard"}


@dataclass(frozen=True, slots=True)
class Loader:
    """What decides how long a step waits: of the loader with most workers."""

    workers: int
    prefetch: int
    persistent: bool


@dataclass(frozen=True, slots=True)
class Pattern:
    """Steps whose wait is far longer than the others, and how they follow each other."""

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
    epochs: Epochs = "unknown"


class DataLoading:
    """Finds steps that wait for their batch, and what the loader lacks."""

    name: ClassVar[str] = "data-loading"
    finds: ClassVar[str] = "Steps that wait for their batch on all ranks, or in a pattern on one"
    needs: ClassVar[str] = "steps; the loader's settings and host samples for the cause"
    silent: ClassVar[str] = "a slower peer hides the wait; one rank always waits: see `straggler`"

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
    rows = _guilty(own, data, roles, saved, policy) if lost >= policy.data_info_share else None
    series = np.nanmax(np.nan_to_num(data if rows is None else data[rows]), axis=0)
    step_ms = float(np.median(step[good]))
    pattern = None
    if len(columns) >= policy.min_steps // 2:
        pattern = pattern_of(table.steps[columns], series, step_ms, policy)
    ranks = () if rows is None else tuple(sorted(table.ranks[row] for row in rows))
    loader = loader_of(window, ranks)
    busy, iowait, cpus = _host_load(window, ranks)
    epochs = _epochs_of(window, pattern, ranks)
    cause = _cause(window, loader, pattern, ranks, busy, iowait, epochs)
    first = int(table.steps[columns[0]]) if pattern is None else pattern.steps[0]
    return Stall(
        lost, float(np.nanmean(median(data[some] / duration, 0))), cause, ranks, pattern,
        loader, step_ms, float(np.nanmean(series)), busy, iowait, cpus, first, len(columns),
        (float(each.min()), float(each.max())), len(columns) < policy.min_steps, epochs,
    )  # fmt: skip


def _columns(window: Window) -> Array | None:
    """Return the newest normal steps; None for too few of them.

    A recording of few steps begins long after a run's first steps, and shows a share all the same.
    """
    table, policy = window.steps, window.policy
    if window.facts.is_recording and table.num_steps < policy.min_steps:
        return np.arange(table.num_steps) if table.num_steps >= policy.short_steps else None
    columns = np.flatnonzero(usual_steps(table, policy, are_most_special=True))[
        -policy.data_steps :
    ]
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


def _guilty(
    own: Array, data: Array, roles: list[object], saved: Array, policy: Policy
) -> list[int] | None:
    """Return the rows without whose waits most of the loss is gone, None if it takes many."""
    if len(own) < 2 or not saved.sum() > 0:
        return None
    order = np.argsort(np.nansum(data, axis=1))[::-1]
    most = max(1, int(policy.data_ranks_share * len(own)))
    healed = data.copy()
    typical = np.fmin.reduce(data, axis=0) if len(data) == 2 else median(data, 0)
    for count in (1 << power for power in range(most.bit_length())):
        rows = order[:count]
        healed[rows] = np.fmin(data[rows], typical)
        rest = saved_ms(own - data + healed, healed, roles)
        if rest.sum() <= policy.data_rest_share * saved.sum():
            excess = np.nansum(np.fmax(data[rows] - typical, 0.0), axis=1)
            return [int(row) for row in rows[excess >= policy.data_guilty_share * excess.max()]]
    return None


def pattern_of(steps: Array, waits: Array, step_ms: float, policy: Policy) -> Pattern | None:
    """Return the steps that hold most of the waiting, None if it is spread over all steps."""
    level = max(
        policy.data_spike_ratio * float(np.median(waits)), policy.data_spike_share * step_ms
    )
    spikes = np.flatnonzero(waits > level)
    is_most = waits[spikes].sum() >= policy.data_spikes_share * waits.sum()
    if not len(spikes) or not is_most or len(spikes) > policy.data_spike_steps_share * len(waits):
        return None
    # A late batch may hold up the next ones too: what follows at once belongs to it.
    starts = spikes[np.concatenate([[True], np.diff(spikes) > 1])]
    at = steps[starts]
    gaps = np.diff(at)
    every = 0
    if len(gaps) >= 2:
        gap, count = Counter(gaps.tolist()).most_common(1)[0]
        near = np.abs(gaps - gap) <= max(1, policy.data_gap_share * gap)
        if near.mean() >= policy.data_even_share and (count >= 2 or gap > policy.data_far_steps):
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
    return max(loaders, key=lambda loader: (loader.workers, loader.prefetch), default=None)


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
    epochs: Epochs,
) -> Cause:
    if pattern is not None:
        return _cause_of_pattern(loader, pattern, ranks, epochs)
    if loader is not None and loader.workers == 0:
        return "no workers"
    if iowait is not None and iowait > window.policy.iowait_share:
        return "fetch"
    if loader is None or busy is None:
        return "unknown"
    local = max((known.local_world_size for known in window.ranks.values()), default=1)
    full = busy >= window.policy.workers_busy_share * loader.workers * local
    return "preprocessing" if full else "unknown"


def _epochs_of(window: Window, pattern: Pattern | None, ranks: tuple[int, ...]) -> Epochs:
    """Return whether passes over the data begin where the waits are, as far as they are known."""
    if pattern is None:
        return "unknown"
    passes = [
        (number, one.step)
        for numbers in window.facts.passes.by_loader.values()
        for number, by_rank in numbers.items()
        for rank, one in by_rank.items()
        if not ranks or rank in ranks
    ]
    if not passes:
        return "unknown"
    said = {step for _, step in passes}
    # the first passes are said, each some steps after it began
    has_all = max(number for number, _ in passes) < MAX_PASSES
    last = int(window.steps.steps[-1]) if has_all else max(said)
    waits = [step for step in pattern.steps if step + _SAID_AFTER <= last]
    if not waits:
        return "unknown"
    met = sum(not said.isdisjoint(range(step - 1, step + _SAID_AFTER + 1)) for step in waits)
    return "there" if 2 * met >= len(waits) else "elsewhere"


def _cause_of_pattern(
    loader: Loader | None, pattern: Pattern, ranks: tuple[int, ...], epochs: Epochs
) -> Cause:
    workers = loader.workers if loader else 0
    batches = workers * max(loader.prefetch, 1) if loader else 0
    if workers > 1 and pattern.every == workers:
        return "slow worker"
    if workers and batches > workers and pattern.every == batches:
        return "under-prefetch"
    if epochs == "there" or (epochs == "unknown" and pattern.every > max(2 * batches, 8)):
        return "epoch start"
    return "bad shard" if ranks else "unknown"


def finding_of(window: Window, stall: Stall) -> Finding:
    """Return the finding on a job that waits for data."""
    kind = _KINDS.get(stall.cause, "slow_data")
    lost = stall.lost
    severity: Severity = "warning" if lost >= window.policy.data_warning_share else "info"
    is_recording = window.facts.is_recording
    if is_recording and severity != "info":  # what will come cannot make it surer
        severity = severity_of_cost(lost, window.policy)
    has_onset = stall.pattern is not None or not is_recording
    confidence, reason = _confidence(stall)
    if is_recording and stall.num_steps < window.policy.min_steps:
        confidence = min(confidence, 0.7)
        reason += f"; {stall.num_steps} steps, since when and whether it lasts is not known"
    tag = "+".join(map(str, stall.ranks[:8])) or "all"
    return window.finding(
        kind,
        f"{kind}/{tag}",
        detector="data-loading",
        severity=severity,
        ranks=stall.ranks,
        onset_step=stall.first_step if has_onset else None,
        cost=lost,
        what=_what(window, stall),
        why=_why(stall),
        next=_next(window, stall),
        command="iostat -x 1" if stall.cause == "fetch" else "",
        confidence=(confidence, reason),
        evidence=_evidence(window, stall),
        ruled_out=("Waits that a slower peer would have caused anyway: they are not counted",),
        disproof="Batches come from somewhere other than a DataLoader, or the step waits "
        "for communication that these waits hide",
    )


def _what(window: Window, stall: Stall) -> str:
    lost = percent_text(stall.lost)
    if stall.ranks:
        who = window.who(stall.ranks)
        wait = "wait" if len(stall.ranks) > 1 else "waits"
        return f"{who} {wait} long for some batches; the job loses {lost} to it"
    if stall.cause == "epoch start":
        if stall.epochs == "there":
            return f"Each epoch begins with a wait for data; {lost} of the time is lost to it"
        every = stall.pattern.every if stall.pattern else 0
        return (
            f"The job waits for data every {every:,} steps, as where epochs begin; {lost} of the "
            "time is lost to it"
        )
    return f"The job waits for data: {lost} of each step"


def _why(stall: Stall) -> str:
    least, most = (percent_text(share) for share in stall.range)
    text = f"A step takes {ms_text(stall.step_ms)}, of it {ms_text(stall.wait_ms)} wait for a batch"
    text += f" ({least} to {most} of each of the {stall.num_steps} steps)" * stall.is_short
    loader = stall.loader
    if stall.pattern is not None:
        peak = f"{len(stall.pattern.steps)} waits are far longer than the others"
        every = stall.pattern.every
        text = f"{peak} in {stall.num_steps} steps"
        text += f", one every {every:,} steps" if every else ", at no even distance"
    words = {
        "no workers": "; the loader has no workers, the training process loads by itself",
        "preprocessing": f"; its workers are busy ({stall.busy_cores or 0:.0f} cores), the disks "
        "are not: preprocessing is the limit",
        "fetch": f"; processors wait for disks {percent_text(stall.iowait or 0.0)} of the time: "
        "reading is the limit",
        "slow worker": f"; the loader has {loader.workers if loader else 0} workers, so one of "
        "them is slow: its shard, file or mount",
        "under-prefetch": "; that is all batches that are loaded ahead: it runs empty each time",
        "epoch start": _epoch_text(loader),
        "bad shard": "; the other ranks do not wait: it is what this rank reads",
        "unknown": "",
    }
    return text + words[stall.cause]


def _epoch_text(loader: Loader | None) -> str:
    if loader is None:
        return "; of the loader nothing is known"
    if not loader.persistent:
        return "; workers start anew at each epoch"
    return "; the workers persist, so it is the new order or a cold cache"


def _next(window: Window, stall: Stall) -> str:
    loader = stall.loader
    if stall.cause == "no workers":
        cores = ", as far as the cores allow" * window.facts.is_recording
        return f"Give the DataLoader num_workers={_workers(window, stall)}{cores}"
    if stall.cause == "preprocessing":
        wanted, local = _workers(window, stall), _local(window)
        if stall.num_cpus and wanted * local > stall.num_cpus:
            return (
                f"{wanted} workers a rank would be needed, more than the {stall.num_cpus} cores "
                "give: preprocess once and store the result, or decode on the GPU"
            )
        return f"Raise num_workers from {loader.workers if loader else 0} to {wanted}"
    if stall.cause == "fetch":
        return "Copy the data to a local disk or read larger files in order; look at iostat"
    if stall.cause == "epoch start":
        return _next_of_epoch(stall)
    if stall.cause == "under-prefetch":
        return f"Raise prefetch_factor from {loader.prefetch if loader else 2}"
    if stall.cause == "bad shard":
        return "Time the files that this rank reads in these steps, against those of another rank"
    if stall.cause == "slow worker":
        return "Time each worker's files; spread the slow ones over all workers"
    return _next_unknown(window)


def _next_of_epoch(stall: Stall) -> str:
    if stall.loader is not None:
        persists = stall.loader.persistent
        shuffle = "Time the sampler's shuffle and the data set's start of an epoch"
        return shuffle if persists else "Give the DataLoader persistent_workers=True"
    every = stall.pattern.every if stall.pattern else 0
    return (
        f"See whether an epoch begins with these steps: if not, what is read every {every:,} "
        "batches, such as the next file"
    )


def _next_unknown(window: Window) -> str:
    if window.facts.is_recording:
        return (
            "Profile the loader's workers, or raise their number by half and record again: if the "
            "share falls they were too few, else the disk is the limit"
        )
    return (
        "Look at what a loader worker does: on the processor it is preprocessing, in a read it is "
        "the disk; py-spy top on one of them decides"
    )


def _local(window: Window) -> int:
    return max((known.local_world_size for known in window.ranks.values()), default=1)


def _workers(window: Window, stall: Stall) -> int:
    """Return how many workers keep up with a step that does not wait, with a tenth to spare."""
    computing = max(stall.step_ms * (1 - stall.lost), 1e-3)
    loader = stall.loader
    if loader is None or loader.workers == 0:
        return max(1, math.ceil(1.1 * stall.wait_ms / computing) + 1)
    return max(loader.workers + 1, math.ceil(1.1 * loader.workers * stall.step_ms / computing))


def _evidence(window: Window, stall: Stall) -> tuple[Evidence, ...]:
    rank = stall.ranks[0] if stall.ranks else (window.steps.ranks or [0])[0]
    facts = [
        Evidence(
            f"Median rank: {percent_text(stall.share)} of the step waits for data over "
            f"{stall.num_steps} steps",
            window.link(rank, stall.first_step),
        )
    ]
    if stall.pattern is not None:
        steps = ", ".join(f"{step:,}" for step in stall.pattern.steps[:8])
        facts.append(Evidence(f"Long waits at steps {steps}", window.link(rank)))
    if stall.loader is not None:
        text = f"DataLoader: num_workers {stall.loader.workers}"
        if stall.loader.workers:
            text += f", prefetch_factor {stall.loader.prefetch}, persistent_workers "
            text += str(stall.loader.persistent)
        facts.append(Evidence(text))
    return tuple(facts)


def _confidence(stall: Stall) -> tuple[float, str]:
    """Return 0.9 where a second signal shows the cause, 0.6 where only the wait is known."""
    if stall.cause == "unknown":
        return 0.6, "the wait is measured, its cause is not"
    if stall.cause in ("preprocessing", "fetch"):
        return 0.9, "the wait and the host's processors agree"
    if stall.cause == "epoch start" and stall.epochs == "unknown":
        return 0.7, "the waits come at an even distance; whether epochs begin there is not known"
    if stall.pattern is not None and stall.pattern.every:
        return 0.85, "the waits come at the distance that this cause makes"
    return 0.8, "the wait is measured, and the loader's settings explain it"
