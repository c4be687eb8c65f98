"""How findings are worded: ranks, times, shares, confidence. One place, so that all read alike."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMED = 6
_TIMES = "\N{MULTIPLICATION SIGN}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 5 and 7"; consecutive ones as a range, long lists cut."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    shown = [str(rank) for rank in ordered[:_MAX_NAMED]]
    if len(ordered) > len(shown):
        return f"ranks {', '.join(shown)} and {len(ordered) - len(shown)} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def capital(text: str) -> str:
    """Return a sentence with its first letter large."""
    return text[:1].upper() + text[1:]


def place_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return "rank 3 on node-a"."""
    where = "" if not hosts else f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    return ranks_text(ranks) + where


def ms_text(milliseconds: float) -> str:
    """Return a duration with its unit, three digits of it."""
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:,.1f} s"
    if milliseconds >= 100:
        return f"{milliseconds:,.0f} ms"
    if 0 < milliseconds < 0.1:
        return f"{1000 * milliseconds:.2g} us"
    return f"{milliseconds:.1f} ms"


def seconds_text(seconds: float) -> str:
    """Return a duration in seconds, with one digit where it is short, in ms where it is less."""
    if seconds < 1:
        return ms_text(1000 * seconds)
    return f"{seconds:.0f} s" if seconds >= 20 else f"{seconds:.1f} s"


def span_text(seconds: float) -> str:
    """Return a time span in the unit that suits it: ms, seconds, minutes, hours, days."""
    if seconds < 1:
        return ms_text(1000 * seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def bytes_text(size_bytes: float) -> str:
    """Return a size in KiB, MiB, GiB or TiB, three digits of it."""
    size, unit = abs(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    text = f"{size:.0f}" if size >= 100 or unit == "B" else f"{size:.1f}"
    return f"{'-' if size_bytes < 0 else ''}{text} {unit}"


def percent_text(ratio: float) -> str:
    """Return a share; one digit below 10 %, and never 0 for what is more."""
    percent = 100 * ratio
    if 0 < abs(percent) < 0.05:
        return f"{percent:.2f} %" if abs(percent) >= 0.01 else "under 0.01 %"
    return f"{percent:.0f} %" if abs(percent) >= 10 else f"{percent:.1f} %"


def hours_text(hours: float) -> str:
    """Return rank-hours, two digits of a small number."""
    return f"{hours:,.0f} rank-hours" if hours >= 10 else f"{hours:.2g} rank-hours"


def si_text(value: float, unit: str) -> str:
    """Return a large number with an SI prefix: 7.87 GFLOP/s, 12.5 ktokens."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if prefix == 'k' else size):.3g} {prefix}{unit}".rstrip()
    return f"{value:,.4g} {unit}".rstrip()


def times_text(ratio: float) -> str:
    """Return "1.9 times"."""
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def ratio_text(ratio: float) -> str:
    """Return a ratio with three digits at most and the sign for "times"."""
    return f"{ratio:.1f}{_TIMES}" if ratio < 10 else f"{ratio:.0f}{_TIMES}"


def confidence_word(confidence: float) -> str:
    """Return high (a second signal agrees), medium (one signal) or low (a hedge)."""
    return "high" if confidence >= 0.85 else "medium" if confidence >= 0.6 else "low"


def cut(text: str, length: int = 200) -> str:
    """Return one line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
