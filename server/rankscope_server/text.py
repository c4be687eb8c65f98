"""Words for numbers: levels, exits, shares, durations."""

from __future__ import annotations

import itertools
import signal
from typing import Any

LEVEL_BOUNDS = {"CRITICAL": 50, "ERROR": 40, "WARNING": 30, "INFO": 20, "DEBUG": 10, "TRACE": 0}
LEVELS = tuple(LEVEL_BOUNDS)


def level_name(level: int) -> str:
    """Return the name of a logging level; levels between two take the lower one's name."""
    return next((name for name, bound in LEVEL_BOUNDS.items() if level >= bound), "TRACE")


def exit_text(row: Any) -> str:
    """Return how a rank ended, in words; empty while it lives."""
    if row.ended_ns is None:
        return ""
    if row.end_reason == "clean":
        return "ended cleanly"
    if row.end_reason == "lost":
        return "lost: its end was not seen"
    if row.exit_signal is not None:
        return f"killed by {signal_name(row.exit_signal)}"
    if row.end_reason == "exception":
        return f"exception: {row.end_detail}" if row.end_detail else "ended by an exception"
    return f"exit code {row.exit_code}" if row.exit_code is not None else str(row.end_reason)


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def duration_text(ms: float) -> str:
    """Return a duration with two or three significant digits and its unit."""
    if ms >= 10_000:
        return f"{ms / 1e3:,.1f} s"
    if ms >= 1_000:
        return f"{ms / 1e3:.2f} s"
    if 0 < ms < 0.1:
        return f"{1e3 * ms:.3g} us"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def rank_list(ranks: list[int], most: int = 8) -> str:
    """Return "rank 2", "ranks 1, 2, 4 and 5 more", or "ranks 0 to 1023" of all between."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(str(rank) for rank in ranks[:most])
    rest = len(ranks) - most
    return f"ranks {shown}" + (f" and {rest:,} more" if rest > 0 else "")


def group_text(ranks: list[int], world_size: int, description: str = "") -> str:
    """Return which ranks a process group has, after the name that its maker gave it.

    Groups of parallel dimensions are ranges ("ranks 0 to 7") or combs ("8 ranks from 0, 4 apart").
    """
    members = _members_text(sorted(ranks), world_size)
    return members if description in NO_GROUP_NAMES else f"{description[:64]}: {members}"


NO_GROUP_NAMES = (
    "",
    "default_pg",
    "default",
    "undefined",
)  # PyTorch's own words, and older agents'


def _members_text(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return f"all {world_size:,} ranks"
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) < 3 or len(steps) != 1:
        return rank_list(ranks, 4) if ranks else "no rank"
    if steps == {1}:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks):,} ranks from {ranks[0]}, {steps.pop()} apart"


def size_text(num_bytes: int) -> str:
    """Return a size as people read it."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
