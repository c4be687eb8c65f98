"""What the numbers say, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankscope_server.api.communication.links import Expected, Link, Pair
from rankscope_server.api.communication.schema import CommunicationRow
from rankscope_server.findings.text import percent_text
from rankscope_server.text import duration_text, plural, size_text

_LATE_SHARE = 2.0  # times what chance gives each rank: such a rank is named
_LATE_RATIO = 0.1  # of the typical call: the first one waits so long for the last


def first_sentence(
    rows: Sequence[CommunicationRow], step_ms: float | None, world_size: int, first: int, last: int
) -> str:
    """Return the answer of the page."""
    if not rows:
        if world_size == 1:
            return "One rank: it has no one to communicate with."
        steps = f"steps {first:,} to {last:,}" if last >= first else "this attempt"
        return f"No call was recorded in {steps}."
    count = sum(row.count for row in rows)
    known = [row for row in rows if row.exposed_ms_per_step is not None]
    if not known:
        return (
            f"{count:,} calls in steps {first:,} to {last:,}; how long a step waits for them is "
            "not known."
        )
    total = sum(row.exposed_ms_per_step or 0.0 for row in known)
    share = f" ({percent_text(total / step_ms)} of it)" if step_ms else ""
    if total <= 0:
        return f"No rank waits in communication in steps {first:,} to {last:,}."
    top = known[0]
    text = (
        f"Ranks wait {duration_text(total)} of a step{share} in communication on average, most in "
        f"{_name(top)}"
    )
    if top.busbw_bytes_per_second is not None:
        text += f" at {speed_text(top.busbw_bytes_per_second)} of bus bandwidth"
    return f"{text}{_late(top)}."


def _name(row: CommunicationRow) -> str:
    where = row.group_text or f"group {row.group}"
    size = f" of {class_text(row)}" if row.size_hi else ""
    return f"{row.operation}{size} over {where}"


def class_text(row: CommunicationRow) -> str:
    """Return a size class, or the one size that all its calls have."""
    if row.size_least == row.size_largest:
        return size_text(row.size_least)
    return f"{size_text(row.size_lo)} to {size_text(row.size_hi)}"


def _late(row: CommunicationRow) -> str:
    """Return who arrives last, where one rank does far more often than chance."""
    if not row.last or not row.num_ranks or not row.p50_ms:
        return ""
    often = max(row.last, key=lambda one: one.count)
    waits = row.spread_p50_ms or 0.0
    if often.share * row.num_ranks < _LATE_SHARE or waits < _LATE_RATIO * row.p50_ms:
        return ""
    return (
        f"; rank {often.rank} arrives last in {percent_text(often.share)} of them, and the first "
        f"one waits {duration_text(waits)} for the last"
    )


def speed_text(bytes_per_second: float) -> str:
    """Return a bandwidth in SI units: 19.8 GB/s, 78.2 kB/s."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.3g} {prefix}B/s"
    return f"{bytes_per_second:.3g} B/s"


def expected_text(expected: Expected | None, num_nodes: int) -> str:
    """Return where an expectation comes from, or why there is none."""
    if num_nodes == 1:
        return "not known: a preflight measures ways between nodes, and this group is on one"
    if expected is None:
        return "not known: no preflight of this run measured links of its nodes"
    text = f"the slowest link that the preflight measured, {expected.start} to {expected.end}"
    if expected.num_measured < expected.num_ways:
        text += f"; {expected.num_measured:,} of {expected.num_ways:,} ways are measured"
    return text


def links_text(messages: Mapping[Pair, Link], measured: Mapping[Pair, Link]) -> str:
    """Return what is known of the links between nodes of the run."""
    if not messages and not measured:
        return (
            "No link was measured: no send or receive was recorded at both ends, and no preflight "
            "of this run measured its links"
        )
    parts = []
    for links, source in ((messages, "messages"), (measured, "the preflight")):
        if links:
            pair, link = min(links.items(), key=lambda one: one[1].bytes_per_second)
            way = f"within {pair[0]}" if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
            speed = ("at least " if link.is_at_least else "") + speed_text(link.bytes_per_second)
            parts.append(f"the slowest of {plural(len(links), 'way')} by {source}: {way}, {speed}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


def notes(rows: Sequence[CommunicationRow], num_incomplete: int, num_met: int) -> list[str]:
    """Return what of the numbers is not known."""
    found = []
    if num_incomplete:
        found.append(
            f"{plural(num_incomplete, 'collective')} of {num_met + num_incomplete:,} are known of "
            "some members only: who came last in them, and how fast they were, is not counted"
        )
    unsure = sum(row.num_last_unknown for row in rows)
    if unsure:
        found.append(
            f"Who came last is not known of {unsure:,} in {plural(num_met, 'collective')}: over "
            "several nodes clocks and the time that each rank was there name different ranks"
        )
    opened = sum(row.open for row in rows)
    if opened:
        found.append(f"{plural(opened, 'call')} had not ended: their times are not known")
    if any(row.exposed_ms_per_step is None for row in rows):
        found.append(
            "How long a step waits for some calls is not known, nor what it hides: devices wait "
            "for them, or another tool recorded them"
        )
    return found
