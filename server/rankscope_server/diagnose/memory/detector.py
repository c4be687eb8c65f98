"""Memory that grows with the steps, and when it will be full; what of it is never used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rankscope_server.diagnose.memory.room import HOST, Room, device_room, host_room
from rankscope_server.diagnose.memory.unused import unused
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    DetectorResult,
    Evidence,
    Finding,
    Level,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.text import bytes_text, capital, percent_text, ranks_text, span_text
from rankscope_server.findings.trends import Trend, trend_of
from rankscope_server.observe.memory_table import WIDTHS, MemoryTable

_FILE_PART = {
    "rss_bytes": "rss_file_bytes",
    "workers_rss_bytes": "workers_rss_file_bytes",
}
GROWING: tuple[str, ...] = ("cuda_allocated_bytes", *HOST)
_MAX_TESTED = 32  # ranks that grew most; the rest is compared with them
_WORDS = {
    "rss_bytes": "host memory",
    "workers_rss_bytes": "host memory by its loader workers",
    "cuda_allocated_bytes": "GPU memory",
}
_OF_WORKERS = "workers_rss_bytes"


@dataclass(frozen=True, slots=True)
class Growth:
    """One rank's memory that grows. Steps are counted from now; None: no limit is known."""

    rank: int
    name: str
    trend: Trend
    now_bytes: float
    room: Room | None
    steps_left: float | None
    steps_left_low: float | None
    steps_left_high: float | None
    is_of_files: bool = False  # the kernel takes it back at need


class MemoryGrowth:
    """Finds memory that grows step by step, and forecasts when it runs out."""

    name: ClassVar[str] = "memory-growth"
    finds: ClassVar[str] = (
        "Memory that grows with the steps, and when it is full; fragmentation; GPU memory that no "
        "rank ever uses"
    )
    needs: ClassVar[str] = "memory of ranks; a limit for the forecast, and for what is not used"
    silent: ClassVar[str] = (
        "first 50 steps, plateaus, caches that fill; file pages are info; memory of hosts that is "
        "not used"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return which ranks' memory grows."""
        table, policy = window.facts.memory, window.policy
        names = [name for name in GROWING if name in table.names()]
        if not names:
            return skipped(
                self, "no memory was recorded", "attach the agent: it reads memory once a second"
            )
        newest = max(int(table.last_step[name].max()) for name in names)
        if newest <= policy.memory_skip_steps:
            need = policy.memory_skip_steps
            return skipped(self, f"needs more than {need} steps, has {newest}", "wait")
        findings: list[Finding] = []
        for name in names:
            growing = growths(window, name)
            if growing:
                findings.append(growth_finding(window, growing, _alike(window, name, growing)))
        findings += _fragmentation(window)
        checked = () if findings else (f"memory: none of {len(table.row_of)} ranks grows",)
        if not findings:
            findings += unused(window)
        return ran(self, findings, checked)


def growths(window: Window, name: str) -> list[Growth]:
    """Return the ranks whose memory of one kind grows, the first to be full first."""
    table, policy = window.facts.memory, window.policy
    rows = len(table.row_of)
    grown = np.max([table.growth(name, level) for level in range(len(WIDTHS))], axis=0)
    candidates = np.argsort(grown[:rows])[::-1][:_MAX_TESTED]
    ranks = list(table.row_of)
    found = []
    for row in candidates:
        if grown[row] < policy.memory_least_bytes:
            break
        trend = _trend(window, ranks[row], name)
        if trend is not None:
            found.append((ranks[row], trend))
    by_host: dict[str, float] = defaultdict(float)
    for rank, trend in found:
        by_host[window.host(rank)] += trend.slope
    result = [_growth(window, rank, name, trend, by_host[window.host(rank)])
              for rank, trend in found]  # fmt: skip
    return sorted(result, key=lambda one: (one.steps_left or np.inf, one.rank))


def _trend(window: Window, rank: int, name: str) -> Trend | None:
    """Return the trend at the finest level with enough samples that shows one."""
    policy = window.policy
    for level in range(len(WIDTHS)):
        steps, values = window.facts.memory.series(rank, name, level)
        late = steps > policy.memory_skip_steps
        trend = trend_of(
            steps[late],
            values[late],
            least=policy.memory_least_bytes,
            max_p=policy.memory_trend_p,
            min_points=policy.memory_min_points,
            over_steps=policy.memory_over_steps,
        )
        if trend is not None:
            return trend
    return None


def _growth(window: Window, rank: int, name: str, trend: Trend, host_slope: float) -> Growth:
    now = window.facts.memory.newest(rank, name) or 0.0
    is_host = name in HOST
    room = host_room(window, rank) if is_host else device_room(window, rank, now)
    share = host_slope / trend.slope if is_host else 1.0  # ranks of a host fill one memory
    left = low = high = None
    if room is not None:
        left, low, high = (
            max(0.0, room.left_bytes) / (slope * share) if slope > 0 else np.inf
            for slope in (trend.slope, trend.high, trend.low)
        )
    return Growth(
        rank, name, trend, now, room, left, low, high, _is_of_files(window, rank, name, trend)
    )


def _is_of_files(window: Window, rank: int, name: str, trend: Trend) -> bool:
    """Return whether most of what grows are pages of files that the process has mapped.

    Resident memory counts them, and the kernel takes them back when it needs them.
    """
    for level in range(len(WIDTHS)):
        steps, values = window.facts.memory.series(rank, _FILE_PART.get(name, ""), level)
        late = steps >= trend.onset
        if late.sum() >= window.policy.memory_min_points:
            grown = float(values[late][-1] - values[late][0])
            span = float(steps[late][-1] - steps[late][0])
            return grown > window.policy.memory_file_share * trend.slope * span
    return False


def _step_ms(window: Window) -> float | None:
    recent = window.steps.get("duration", max(0, window.steps.num_steps - 100))
    known = recent[~np.isnan(recent)]
    return float(np.median(known)) if len(known) else None


def seconds_left(window: Window, steps: float) -> float | None:
    """Return how long some steps take at the present pace."""
    step_ms = _step_ms(window)
    return steps * step_ms / 1e3 if step_ms else None


def _alike(window: Window, name: str, growing: Sequence[Growth]) -> tuple[int, ...]:
    """Return the ranks that grew as much as those that were tested, but were not tested."""
    table = window.facts.memory
    if len(growing) < _MAX_TESTED:
        return ()
    level = 0
    grown = table.growth(name, level)
    least = 0.5 * min(grown[table.row_of[growth.rank]] for growth in growing)
    tested = {growth.rank for growth in growing}
    return tuple(rank for rank, row in table.row_of.items()
                 if rank not in tested and grown[row] >= least)  # fmt: skip


def _fragmentation(window: Window) -> list[Finding]:
    """Return the ranks whose allocator holds much that no tensor uses."""
    table, policy = window.facts.memory, window.policy
    if "cuda_reserved_bytes" not in table.names():
        return []
    rows = len(table.row_of)
    held, peak, used = (
        _filled(table, f"cuda_{name}_bytes", rows) for name in ("reserved", "peak", "allocated")
    )
    idle = held - np.maximum(peak, used)
    found = []
    ranks = list(table.row_of)
    for row in np.flatnonzero(idle > policy.memory_least_bytes)[:_MAX_TESTED]:
        room = device_room(window, ranks[row], float(used[row]))
        if room is not None and idle[row] > policy.fragmentation_share * room.limit_bytes:
            found.append((ranks[row], float(idle[row]), float(held[row]), room.limit_bytes))
    return [fragmentation_finding(window, found)] if found else []


def _filled(table: MemoryTable, name: str, rows: int) -> NDArray[np.float64]:
    """Return the newest values by row, 0 where a rank, or every rank, never reported one."""
    values = np.zeros(rows)
    known = table.last.get(name, values)[:rows]
    values[: len(known)] = known
    return values


def growth_finding(window: Window, growing: Sequence[Growth], alike: tuple[int, ...]) -> Finding:
    """Return the finding on ranks whose memory grows, the first to be full first."""
    first = growing[0]
    ranks = tuple(sorted({growth.rank for growth in growing} | set(alike)))
    is_alone = len(ranks) <= window.policy.global_share * window.world_size
    severity, confidence = _severity(window, first, is_alone=is_alone), _confidence(first)
    reasons = "growth and limit are both measured" if first.room else "growth is measured"
    if first.is_of_files:
        reasons = "most of it are pages of mapped files, which the kernel takes back when it must"
    return window.finding(
        "memory_growth",
        f"{first.name}/{'+'.join(map(str, ranks[:8]))}",
        severity=severity,
        ranks=ranks,
        onset_step=first.trend.onset,
        what=_what(window, first, ranks),
        why=_why(window, first, ranks),
        next=_next(first),
        command=f"rankscope ask stacks --rank {first.rank}",
        confidence=(confidence, reasons),
        evidence=tuple(_evidence(window, growth) for growth in growing[:4]),
        ruled_out=("Warm-up and a high-water mark: it still grows as fast in its last quarter",),
        disproof="A cache or buffer of known size is being filled and stops by itself",
        levels=[Level(first.name, "no room is left", _full_bytes(first, first.room))]
        if first.room is not None
        else (),
    )


def _full_bytes(growth: Growth, room: Room) -> float:
    """Return how much this rank holds when nothing is left."""
    return growth.now_bytes + max(0.0, room.left_bytes)


def _severity(window: Window, growth: Growth, *, is_alone: bool) -> Severity:
    policy = window.policy
    if growth.steps_left_high is None or growth.is_of_files:
        return "info"
    # A cache fills on all ranks alike; what grows on one of them only is no cache.
    if not is_alone and growth.steps_left_high > policy.oom_reach * growth.trend.span:
        return "info"
    seconds = seconds_left(window, growth.steps_left_high)
    near = growth.steps_left_high < policy.oom_warning_steps
    near |= seconds is not None and seconds < policy.oom_warning_seconds
    if not near:
        return "info"
    soon = seconds is not None and seconds < policy.oom_critical_seconds
    return "critical" if soon else "warning"


def _what(window: Window, growth: Growth, ranks: tuple[int, ...]) -> str:
    word = _WORDS[growth.name]
    everyone = len(ranks) > 1 and len(ranks) == len(window.facts.memory.row_of)
    who = "Every rank" if everyone else window.who(ranks)
    many = len(ranks) > 1 and not everyone
    if growth.steps_left is None or growth.steps_left_high is None or growth.steps_left_low is None:
        return f"{who} {'take' if many else 'takes'} ever more {word}"
    low, high = _round(growth.steps_left_low), _round(growth.steps_left_high)
    verb = "run" if many else "runs"
    text = f"{who} {verb} out of {word} in about {_round(growth.steps_left):,} steps"
    text += f" ({low:,} to {high:,})" if low < high < 10**9 else ""
    seconds = seconds_left(window, growth.steps_left)
    return text + (f", {span_text(seconds)}" if seconds is not None else "")


def _why(window: Window, growth: Growth, ranks: tuple[int, ...]) -> str:
    trend = growth.trend
    speed = (
        f"{bytes_text(trend.slope * trend.every)} every {trend.every:,} steps, in jumps: once an "
        "epoch, evaluation or checkpoint" if trend.is_staircase
        else f"{bytes_text(trend.slope)} a step"
    )  # fmt: skip
    word = "memory of the loader workers" if growth.name == _OF_WORKERS else _WORDS[growth.name]
    text = (
        f"{capital(word)} of rank {growth.rank} grows by {speed} since step "
        f"{trend.onset:,} and is {bytes_text(growth.now_bytes)}"
    )
    if growth.room is not None:
        text += f"; {bytes_text(max(0.0, growth.room.left_bytes))} are left ({growth.room.how})"
    others = len(window.facts.memory.row_of) - len(ranks)
    if others:
        text += f"; the other {others} ranks do not grow"
    return text


def _next(growth: Growth) -> str:
    if growth.trend.is_staircase:
        return (
            "Look for what is kept over each epoch or evaluation, about every "
            f"{growth.trend.every:,} steps: lists of outputs, loaders made anew, caches"
        )
    if growth.name == _OF_WORKERS:
        return (
            "Look for what the data set's __getitem__ keeps, and for Python lists that each worker "
            "copies as it touches them: hold the index in one array"
        )
    if growth.name == "rss_bytes":
        return (
            "Look for lists and tensors that are kept over steps, and for loader workers that copy "
            "the data set; compare tracemalloc snapshots of two steps"
        )
    return (
        "Look for tensors that are kept over steps: losses appended without .item() or .detach(), "
        "graphs kept alive; save a checkpoint before memory is full"
    )


def _confidence(growth: Growth) -> float:
    """Return 0.9 with a known limit, 0.7 without; 0.4 where it is no memory that is gone."""
    if growth.is_of_files:
        return 0.4
    return 0.9 if growth.room is not None else 0.7


def _evidence(window: Window, growth: Growth) -> Evidence:
    low, high = bytes_text(growth.trend.low), bytes_text(growth.trend.high)
    within = f" ({low} to {high})" if low != high else ""
    return Evidence(
        f"Rank {growth.rank}: {bytes_text(growth.trend.slope)} a step{within} over "
        f"{growth.trend.span:,} steps",
        window.link(growth.rank, growth.trend.onset),
    )


def fragmentation_finding(
    window: Window, found: Sequence[tuple[int, float, float, float]]
) -> Finding:
    """Return the finding on ranks whose allocator holds much that no tensor ever used."""
    ranks = tuple(sorted(rank for rank, *_ in found))
    rank, idle, held, limit = max(found, key=lambda one: one[1])
    return window.finding(
        "fragmentation",
        f"fragmentation/{'+'.join(map(str, ranks[:8]))}",
        severity="warning" if held > window.policy.fragmentation_held_share * limit else "info",
        ranks=ranks,
        what=f"CUDA's allocator holds {bytes_text(idle)} on {ranks_text(ranks)} for no tensor",
        why=f"Rank {rank} holds {bytes_text(held)} of {bytes_text(limit)}; its tensors never took "
        f"more than {bytes_text(held - idle)}: {percent_text(idle / limit)} of the GPU is lost to "
        "pieces of the wrong size",
        next="Start with expandable segments, which do not fall into pieces",
        command="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        confidence=(0.8, "read from the allocator itself; the peak may have been reset"),
        disproof="The script resets the peak each step and needs the rest in between",
    )


def _round(steps: float) -> int:
    """Return a number of steps with two digits that count; a forecast has no more."""
    if not steps < 10**9:
        return 10**9
    if steps < 100:
        return round(steps)
    scale: int = 10 ** (len(str(int(steps))) - 2)
    return round(steps / scale) * scale
