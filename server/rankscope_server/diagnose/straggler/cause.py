"""Why a rank is slow, where a second signal besides step times says so.

A signal counts if it differs from that of the rank's reference: its peers in the same steps, or
its own steps before. Without the signal nothing is said: the kind stays that of the phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rankscope.wire.nvidia_codes import THROTTLE_SLOWDOWNS, throttle_words
from rankscope_server.diagnose.shared.processor_limit import CPU_LIMIT, limit_next, limit_text
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.kinds import MORE_WORK
from rankscope_server.findings.statistics import Array
from rankscope_server.findings.text import ms_text, percent_text, ranks_text
from rankscope_server.observe.rank_cost import Excess
from rankscope_server.observe.stack_samples import StackDifference


@dataclass(frozen=True, slots=True)
class SlowCause:
    """A kind with its proof, and what to do."""

    kind: str  # empty: that of the phase
    text: str
    next: str
    command: str = ""
    would_be_wrong_if: str = ""
    work: str = ""  # of which it was given more
    work_ratio: float = 1.0  # to its reference


@dataclass(frozen=True, slots=True)
class Suspect:
    """A slow rank, and what it is compared with."""

    rank: int
    row: int
    columns: slice
    peers: tuple[int, ...]  # rows; none: compared with its own steps before
    healthy: Array  # columns before
    excess: Excess
    ratio: float  # self time / reference
    is_data: bool
    # another rank, and where this one is and it is not, by stacks of both
    apart: tuple[int, StackDifference] | None = None

    @property
    def excess_ms(self) -> float:
        """Return its excess of self time per step."""
        return self.excess.total_ms


def cause_of(window: Window, suspect: Suspect) -> SlowCause | None:
    """Return the first cause that a second signal proves, None where none does."""
    compute = (_more_work, _garbage, _thermal, _limited, _contention, _busy_thread, _own_code)
    for find in (_page_cache, _busy_thread) if suspect.is_data else compute:
        cause = find(window, suspect)
        if cause is not None:
            return cause
    return None


def _means(window: Window, suspect: Suspect, metric: str) -> tuple[float, float]:
    """Return the mean per step of the suspect and of its reference, NaN where not known."""
    values = window.steps.get(metric)
    now = _mean(values[suspect.row, suspect.columns])
    if suspect.peers:
        rows = [_mean(values[row, suspect.columns]) for row in suspect.peers]
        return now, float(np.median(rows))
    return now, _mean(values[suspect.row, suspect.healthy])


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _more_work(window: Window, suspect: Suspect) -> SlowCause | None:
    """It was given more: then it is not slow: longer sequences, for example."""
    steps = window.steps.steps
    first, last = int(steps[suspect.columns.start]), int(steps[suspect.columns.stop - 1])
    mine = window.work.mean(suspect.rank, first, last)
    if suspect.peers:
        ranks = [window.steps.ranks[row] for row in suspect.peers]
        said = [mean for r in ranks if (mean := window.work.mean(r, first, last)) is not None]
        usual = float(np.median(said)) if len(said) * 2 > len(ranks) else None
    else:
        begin = int(steps[suspect.healthy[0]]) if len(suspect.healthy) else first
        usual = window.work.mean(suspect.rank, begin, first - 1)
    if mine is not None and usual and _is_most(window, suspect, mine / usual):
        return SlowCause(
            MORE_WORK,
            f"it was given {mine:,.0f} tokens a step, its reference {usual:,.0f}: that is most of "
            "the excess, so it is not slower but has more to do",
            "Give ranks batches of equal length: sort or pack samples by length across ranks, or "
            "cut a step by tokens and not by samples",
            work="tokens",
            work_ratio=mine / usual,
        )
    return _more_microbatches(window, suspect)


def _more_microbatches(window: Window, suspect: Suspect) -> SlowCause | None:
    """It goes through more of them in a step, as where a batch is no multiple of the ranks."""
    now, usual = _means(window, suspect, "microbatches")
    if not usual > 0 or not _is_most(window, suspect, now / usual):
        return None
    return SlowCause(
        MORE_WORK,
        f"it goes through {now:,.1f} microbatches a step, its reference through {usual:,.1f}: that "
        "is most of the excess, so it is not slower but has more to do",
        "Give all ranks equally many: a batch that is a multiple of ranks and microbatch, or "
        "smaller microbatches",
        work="microbatches",
        work_ratio=now / usual,
    )


def _is_most(window: Window, suspect: Suspect, ratio: float) -> bool:
    """Return whether so many times the work is most of why it takes longer."""
    return ratio - 1 >= window.policy.min_explained_share * (suspect.ratio - 1)


def _garbage(window: Window, suspect: Suspect) -> SlowCause | None:
    now, reference = _means(window, suspect, "gc")
    share = window.policy.min_explained_share
    if not now - reference >= share * suspect.excess_ms:
        return None
    return SlowCause(
        "garbage_collection",
        f"Python's collector pauses it for {ms_text(now)} a step, its reference "
        f"{ms_text(reference)}: that is most of the excess",
        f"Collect on all ranks at the same step: gc.disable() and gc.collect() every some "
        f"hundred steps, or gc.freeze() after the set-up; find what rank {suspect.rank} allocates "
        "that the others do not",
    )


def _thermal(window: Window, suspect: Suspect) -> SlowCause | None:
    begin, end = _times(window, suspect.row, suspect.columns)
    mine = window.samples.gpu(suspect.rank, begin, end)
    if mine is None:
        return None
    clock, bits = mine
    ranks = window.steps.ranks
    theirs = [
        found[0]
        for row in suspect.peers
        if (found := window.samples.gpu(ranks[row], *_times(window, row, suspect.columns)))
    ]
    usual = float(np.median(theirs)) if len(theirs) >= window.policy.min_role_size - 1 else None
    slow_bits = bits & THROTTLE_SLOWDOWNS
    is_low = usual is not None and clock < window.policy.low_clock_ratio * usual
    if not slow_bits and not is_low:
        return None
    why = f"its SM clock is {clock:.0f} MHz"
    why += f", that of its peers {usual:.0f} MHz" if usual is not None else ""
    why += f"; reasons: {', '.join(throttle_words(slow_bits))}" if slow_bits else ""
    return SlowCause(
        "thermal_or_power",
        why,
        f"Look at the cooling and the power of the GPU of rank {suspect.rank}; if the clock stays "
        "low, run the job without it",
        "nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER",
    )


def _own_code(window: Window, suspect: Suspect) -> SlowCause | None:
    """Its script is where a healthy rank is not, outside of what all ranks compute.

    Work that is the same and slower looks like that too where it is no module's: then its CPU time
    rises with it, and nothing is said.
    """
    if suspect.apart is None or not suspect.apart[1].is_outside:
        return None
    share, excess = window.policy.min_explained_share, suspect.excess
    begin, end = _times(window, suspect.row, suspect.columns)
    computes_here = window.samples.gpu(suspect.rank, begin, end) is None
    more_cpu_ms = (excess.cpu_ms or 0.0) - (excess.cpu_reference_ms or 0.0)
    is_busy = computes_here and more_cpu_ms >= (1.0 - share) * excess.total_ms
    is_other = excess.by_phase["other"] >= share * excess.total_ms
    if is_busy and not (is_other and excess.phase_reference_ms["other"] < excess.reference_ms / 2):
        return None
    other, found = suspect.apart
    text, known = found.text(suspect.rank, other), window.ranks.get(suspect.rank)
    return SlowCause(
        "",
        f"the excess is in its script, outside of torch: {text[0].lower()}{text[1:]}",
        f"Look at {found.where}: what one rank prints, logs, saves, evaluates or reads by .item() "
        "in each step holds up all others. Do it less often, in another thread or process, or "
        "share it among the ranks",
        f"py-spy top --pid {known.pid}" if known and known.pid else "",
        would_be_wrong_if="It waits there for what is slow: its device (.item()), a disk, a pipe "
        "that is full",
    )


def _pinned(window: Window, suspect: Suspect) -> str:
    """Return that it may use few processors, empty where it may use as many as its reference.

    That is as many as before, or as its peers where nothing before is known.
    """
    mine = window.samples.cpus_allowed(suspect.rank, *_times(window, suspect.row, suspect.columns))
    reference, usual = "before", None
    if len(suspect.healthy):
        columns = slice(int(suspect.healthy[0]), int(suspect.healthy[-1]) + 1)
        usual = window.samples.cpus_allowed(suspect.rank, *_times(window, suspect.row, columns))
    if usual is None:
        known = [
            cpus
            for row in suspect.peers
            if (cpus := window.samples.cpus_allowed(
                window.steps.ranks[row], *_times(window, row, suspect.columns)
            )) is not None
        ]  # fmt: skip
        reference, usual = "its peers", float(np.median(known)) if known else None
    if mine is None or usual is None or mine > window.policy.pinned_share * usual:
        return ""
    processors = f"{mine:.0f} processor{'s' * (mine > 1)}"
    return f"its training thread may use {processors}, {reference} {usual:.0f}"


def _limited(window: Window, suspect: Suspect) -> SlowCause | None:
    """Its control group may use so much processor time in each period, and uses it up."""
    begin, end = _times(window, suspect.row, suspect.columns)
    throttled = window.samples.throttled_ratio(suspect.rank, begin, end)
    if not throttled:
        return None
    before = _before(window, suspect, begin, end, window.samples.throttled_ratio) or 0.0
    duration_ms, _ = _means(window, suspect, "duration")
    share = window.policy.min_explained_share
    if not (throttled - before) * duration_ms >= share * suspect.excess_ms:
        return None
    return SlowCause(
        CPU_LIMIT,
        f"{limit_text(window, suspect.rank, begin, end, throttled)}: that is most of the excess",
        limit_next(window, suspect.rank),
        "cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu.stat",
    )


def _contention(window: Window, suspect: Suspect) -> SlowCause | None:
    """Others want the processor: the rank is ready to run and does not run."""
    policy = window.policy
    begin, end = _times(window, suspect.row, suspect.columns)
    delay = window.samples.run_delay_ratio(suspect.rank, begin, end)
    before = _before(window, suspect, begin, end, window.samples.run_delay_ratio)
    own_ms, _ = _means(window, suspect, "duration")
    if delay is not None and before is not None:
        waited_ms = (delay - before) * own_ms
        if waited_ms < policy.min_explained_share * suspect.excess_ms:
            return None
        why = (
            f"{percent_text(delay)} of the time it was ready to run and had no processor, its "
            f"reference {percent_text(before)}: that is most of the excess"
        )
    else:
        now, reference = _means(window, suspect, "involuntary_switches")
        cpu, usual_cpu = _means(window, suspect, "cpu")
        more = policy.switches_ratio * reference + policy.min_switches
        if not now >= more or not cpu <= policy.same_cpu_ratio * usual_cpu:
            return None
        why = (
            f"it is taken off its processor {now:.0f} times a step, its reference "
            f"{reference:.0f} times, and needs no more CPU time"
        )
    pinned = _pinned(window, suspect)
    if pinned:
        known = window.ranks.get(suspect.rank)
        return SlowCause(
            "cpu_pinning",
            f"{pinned}; {why}",
            "Give it its processors back: look for taskset, numactl, a cpuset of the container or "
            "the scheduler, and the binding of the launcher",
            f"taskset -acp {known.pid}" if known else "",
        )
    host = window.host(suspect.rank)
    near = [r for r in window.ranks if r != suspect.rank and window.host(r) == host]
    where = f"on {host}" if host else "on its host"
    beside = f"; beside it run {ranks_text(near)}" if near else ""
    return SlowCause(
        "host_contention",
        why,
        f"See what else runs {where}{beside}: move other jobs away, give ranks processors of "
        "their own, or set fewer loader workers and threads",
        "ps -eo pid,psr,ni,pcpu,comm --sort=-pcpu | head -20",
    )


def _busy_thread(window: Window, suspect: Suspect) -> SlowCause | None:
    """Other threads of its process work while it does not: they hold what it waits for."""
    cpu, usual_cpu = _means(window, suspect, "cpu")
    every, usual_every = _means(window, suspect, "process_cpu")
    others, usual_others = every - cpu, usual_every - usual_cpu
    share = window.policy.min_explained_share
    if not others - usual_others >= share * suspect.excess_ms:
        return None
    if not cpu - usual_cpu < (1.0 - share) * suspect.excess_ms:
        return None  # it computes more itself, with all its threads
    known = window.ranks.get(suspect.rank)
    return SlowCause(
        "busy_thread",
        f"other threads of its process take {ms_text(max(others, 0.0))} of processor time a step, "
        f"its reference {ms_text(max(usual_others, 0.0))}, and the one that trains no more "
        "than that: it waits for Python's interpreter lock, or for what they do",
        "See what those threads do: a Python thread that computes holds the interpreter lock and "
        "belongs in a process of its own; a loader that works in threads needs more of them",
        f"py-spy dump --pid {known.pid}" if known else "",
    )


def _before(
    window: Window,
    suspect: Suspect,
    begin: float,
    end: float,
    ratio_of: Callable[[int, float, float], float | None],
) -> float | None:
    """Return a ratio of its peers meanwhile, or its own before."""
    if suspect.peers:
        ranks = [window.steps.ranks[row] for row in suspect.peers]
        known = [ratio for rank in ranks if (ratio := ratio_of(rank, begin, end)) is not None]
        return float(np.median(known)) if known else None
    if not len(suspect.healthy):
        return None
    columns = slice(int(suspect.healthy[0]), int(suspect.healthy[-1]) + 1)
    return ratio_of(suspect.rank, *_times(window, suspect.row, columns))


def _page_cache(window: Window, suspect: Suspect) -> SlowCause | None:
    policy = window.policy
    now, reference = _means(window, suspect, "major_faults")
    if not now >= policy.switches_ratio * reference + policy.min_major_faults:
        return None
    return SlowCause(
        "page_cache",
        f"it reads {now:.1f} pages a step from disk that were not in memory, its reference "
        f"{reference:.1f}",
        f"Give {window.host(suspect.rank) or 'the host'} memory for the page cache: fewer loader "
        "workers, a smaller data set per host, or a copy of it on a local disk",
        "vmtouch -v DATA or: grep -E 'Cached|MemAvailable' /proc/meminfo",
    )


def _times(window: Window, row: int, columns: slice) -> tuple[float, float]:
    """Return from when to when the columns of a row lasted, ns of its host."""
    started = window.steps.get("started_ms")[row, columns]
    known = started[~np.isnan(started)]
    if not len(known):
        return 0.0, 0.0
    last = _mean(window.steps.get("duration")[row, columns])
    return float(known.min()) * 1e6, (float(known.max()) + last) * 1e6
