"""What the page of resources says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope_server.api.resources.quantities import Quantity
from rankscope_server.api.resources.reading import Thing
from rankscope_server.api.resources.schema import PinnedLine, ResourceChart
from rankscope_server.findings.text import bytes_text, percent_text, si_text
from rankscope_server.text import plural

_NOUNS = {"rank": "rank", "gpu": "GPU", "node": "node", "job": "rank"}


def label(scope: str, thing: Thing) -> str:
    """Return "rank 3", "GPU 0 on node-a", "node-a"."""
    if scope == "node":
        return thing.host
    if scope == "gpu":
        return f"GPU {thing.number} on {thing.host}"
    return f"rank {thing.number}" if thing.number >= 0 else "no rank named"


def scope_text(quantity: Quantity, things: Sequence[Thing], expected: int | None) -> str:
    """Return whose a number is, and of how many it is known."""
    noun = _NOUNS[quantity.scope]
    if quantity.is_sum:
        of = f" of {expected:,}, those that report it" if len(things) < (expected or 0) else ""
        return f"of the job: sum over {plural(len(things), 'rank')}{of}"
    if quantity.scope == "job":
        return f"of the job, as {label('rank', things[0])} reports it"
    if len(things) == 1 and expected != 1:
        return f"of {label(quantity.scope, things[0])} alone"
    if expected is not None and len(things) < expected:
        return f"of each {noun}; known of {len(things):,} of {expected:,}"
    return f"of each {noun}: {plural(len(things), noun)}"


def amount(value: float | None, unit: str) -> str:
    """Return a value with its unit."""
    if value is None:
        return "unknown"
    if unit == "bytes":
        return bytes_text(value)
    return percent_text(value) if unit == "ratio" else si_text(value, unit)


def first_sentence(
    charts: Sequence[ResourceChart], apart: Sequence[tuple[ResourceChart, PinnedLine]]
) -> str:
    """Return what is furthest from its peers, or that nothing is an outlier."""
    if not charts:
        return "Nothing was sampled or logged in the time shown"
    if not apart:
        if max(chart.num for chart in charts) < 2:
            return "There is one of each: nothing to compare with"
        compared = {chart.scope for chart in charts if chart.num > 1}
        nouns = [_NOUNS[scope] for scope in ("rank", "gpu", "node") if scope in compared]
        return f"No {' or '.join(nouns)} is an outlier among its peers in the time shown"
    chart, line = apart[0]
    who = line.label[:1].upper() + line.label[1:] if chart.scope == "rank" else line.label
    title = chart.title
    if title[1:2].islower():  # not an abbreviation
        title = title[:1].lower() + title[1:]
    text = (
        f"{who} is an outlier in {title}: {amount(line.value, chart.unit)}, its "
        f"{plural(chart.num - 1, 'peer')} {amount(chart.usual, chart.unit)}"
    )
    others = len({one.label for _, one in apart} - {line.label})
    if others:
        text += f"; {plural(others, 'other outlier')}"
    return text
