"""What the memory detector says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.text import (
    bytes_text,
    capital,
    confidence_word,
    percent_text,
    place_text,
    ranks_text,
    span_text,
)

if TYPE_CHECKING:
    from rankscope_server.diagnose.memory.growth import Growth

_WORDS = {
    "rss_bytes": "host memory",
    "workers_rss_bytes": "host memory by its loader workers",
    "cuda_allocated_bytes": "GPU memory",
}
_OF_WORKERS = "workers_rss_bytes"


def growth_finding(window: Window, growing: Sequence[Growth], alike: tuple[int, ...]) -> Finding:
    """Return the finding on ranks whose memory grows, the first to be full first."""
    first = growing[0]
    ranks = tuple(sorted({one.rank for one in growing} | set(alike)))
    is_alone = len(ranks) <= window.policy.global_share * window.world_size
    severity, confidence = _severity(window, first, is_alone=is_alone), _confidence(first)
    reasons = "growth and limit are both measured" if first.room else "growth is measured"
    if first.is_of_files:
        reasons = "most of it are pages of mapped files, which the kernel takes back when it must"
    return Finding(
        key=f"{window.attempt}/memory-growth/{first.name}/{'+'.join(map(str, ranks[:8]))}",
        detector="memory-growth",
        kind="memory_growth",
        severity=severity,
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        onset_step=first.trend.onset,
        onset_ms=window.time_ms(first.trend.onset),
        what=_what(window, first, ranks),
        why=_why(window, first, ranks),
        next=_next(first),
        next_command=f"rankscope ask stacks --rank {first.rank}",
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reasons}",
        evidence=tuple(_evidence(window, one) for one in growing[:4]),
        ruled_out=("Warm-up and a high-water mark: it still grows as fast in its last quarter",),
        would_be_wrong_if="A cache or buffer of known size is being filled and stops by itself",
        policy_hash=window.policy.hash,
    )


def _severity(window: Window, one: Growth, *, is_alone: bool) -> Severity:
    policy = window.policy
    if one.steps_left_high is None or one.is_of_files:
        return "info"
    # A cache fills on all ranks alike; what grows on one of them only is no cache.
    if not is_alone and one.steps_left_high > policy.oom_reach * one.trend.span:
        return "info"
    seconds = _seconds(window, one.steps_left_high)
    near = one.steps_left_high < policy.oom_warning_steps
    near |= seconds is not None and seconds < policy.oom_warning_seconds
    if not near:
        return "info"
    soon = seconds is not None and seconds < policy.oom_critical_seconds
    return "critical" if soon else "warning"


def _seconds(window: Window, steps: float) -> float | None:
    from rankscope_server.diagnose.memory.growth import seconds_left

    return seconds_left(window, steps)


def _what(window: Window, one: Growth, ranks: tuple[int, ...]) -> str:
    word = _WORDS[one.name]
    everyone = len(ranks) > 1 and len(ranks) == len(window.facts.memory.row_of)
    who = "Every rank" if everyone else capital(place_text(ranks, window.hosts(ranks)))
    many = len(ranks) > 1 and not everyone
    if one.steps_left is None or one.steps_left_high is None or one.steps_left_low is None:
        return f"{who} {'take' if many else 'takes'} ever more {word}"
    low, high = _round(one.steps_left_low), _round(one.steps_left_high)
    verb = "run" if many else "runs"
    text = f"{who} {verb} out of {word} in about {_round(one.steps_left):,} steps"
    text += f" ({low:,} to {high:,})" if high < 10**9 else ""
    seconds = _seconds(window, one.steps_left)
    return text + (f", {span_text(seconds)}" if seconds is not None else "")


def _why(window: Window, one: Growth, ranks: tuple[int, ...]) -> str:
    trend = one.trend
    speed = (
        f"{bytes_text(trend.slope * trend.every)} every {trend.every:,} steps, in jumps: once an "
        "epoch, evaluation or checkpoint" if trend.is_staircase
        else f"{bytes_text(trend.slope)} a step"
    )  # fmt: skip
    word = "memory of the loader workers" if one.name == _OF_WORKERS else _WORDS[one.name]
    text = (
        f"{capital(word)} of rank {one.rank} grows by {speed} since step "
        f"{trend.onset:,} and is {bytes_text(one.now_bytes)}"
    )
    if one.room is not None:
        text += f"; {bytes_text(max(0.0, one.room.left_bytes))} are left ({one.room.how})"
    others = len(window.facts.memory.row_of) - len(ranks)
    if others:
        text += f"; the other {others} ranks do not grow"
    return text


def _next(one: Growth) -> str:
    if one.trend.is_staircase:
        return (
            f"Look for what is kept over each epoch or evaluation, about every {one.trend.every:,} "
            "steps: lists of outputs, loaders made anew, caches"
        )
    if one.name == _OF_WORKERS:
        return (
            "Look for what the data set's __getitem__ keeps, and for Python lists that each worker "
            "copies as it touches them: hold the index in one array"
        )
    if one.name == "rss_bytes":
        return (
            "Look for lists and tensors that are kept over steps, and for loader workers that copy "
            "the data set; compare tracemalloc snapshots of two steps"
        )
    return (
        "Look for tensors that are kept over steps: losses appended without .item() or .detach(), "
        "graphs kept alive; save a checkpoint before memory is full"
    )


def _confidence(one: Growth) -> float:
    """Return 0.9 with a known limit, 0.7 without; 0.4 where it is no memory that is gone."""
    if one.is_of_files:
        return 0.4
    return 0.9 if one.room is not None else 0.7


def _evidence(window: Window, one: Growth) -> Evidence:
    low, high = bytes_text(one.trend.low), bytes_text(one.trend.high)
    return Evidence(
        f"Rank {one.rank}: {bytes_text(one.trend.slope)} a step ({low} to {high}) over "
        f"{one.trend.span:,} steps",
        window.link(one.rank, one.trend.onset),
    )


def fragmentation_finding(
    window: Window, found: Sequence[tuple[int, float, float, float]]
) -> Finding:
    """Return the finding on ranks whose allocator holds much that no tensor ever used."""
    ranks = tuple(sorted(rank for rank, *_ in found))
    rank, idle, held, limit = max(found, key=lambda one: one[1])
    return Finding(
        key=f"{window.attempt}/memory-growth/fragmentation/{'+'.join(map(str, ranks[:8]))}",
        detector="memory-growth",
        kind="fragmentation",
        severity="warning" if held > 0.9 * limit else "info",
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        what=f"CUDA's allocator holds {bytes_text(idle)} on {ranks_text(ranks)} for no tensor",
        why=f"Rank {rank} holds {bytes_text(held)} of {bytes_text(limit)}; its tensors never took "
        f"more than {bytes_text(held - idle)}: {percent_text(idle / limit)} of the GPU is lost to "
        "pieces of the wrong size",
        next="Start with expandable segments, which do not fall into pieces",
        next_command="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        confidence=0.8,
        confidence_text="medium: read from the allocator itself; the peak may have been reset",
        would_be_wrong_if="The script resets the peak each step and needs the rest in between",
        policy_hash=window.policy.hash,
    )


def _round(steps: float) -> int:
    """Return a number of steps with two digits that count; a forecast has no more."""
    if not steps < 10**9:
        return 10**9
    if steps < 100:
        return round(steps)
    scale: int = 10 ** (len(str(int(steps))) - 2)
    return round(steps / scale) * scale
