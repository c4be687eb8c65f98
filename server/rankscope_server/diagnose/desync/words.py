"""What the desync detector says of calls that differ."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.wire.formulas import item_bytes
from rankscope_server.diagnose.shared.call_differences import CallDifference, Side
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.text import capital, cut, ranks_text
from rankscope_server.observe.alignment import Edit
from rankscope_server.observe.calls import Call

_SITE_LENGTH = 90
_SHOWN_CALLS = 5


def desync_finding(window: Window, difference: CallDifference) -> Finding:
    """Return the finding of a group's first difference."""
    edit = difference.edits[0] if difference.edits else Edit("replaced", 0, 0)
    everyone = tuple(sorted((*difference.culprits.ranks, *difference.others.ranks)))
    ranks = everyone if difference.is_tie else difference.culprits.ranks
    confidence, reasons = _confidence(difference)
    name = "+".join(str(rank) for rank in ranks[:16])
    if difference.is_tie and difference.num_present < difference.num_members:
        ranks = ()  # the calls of the other members, which would show it, never came
    return window.finding(
        "desync",
        f"desync/{difference.group}/{name}",
        severity="info" if _is_habit(window, difference) else "critical",
        ranks=ranks,
        group=difference.group,
        onset_step=difference.step or None,
        onset_ms=difference.time_ns / 1e6,
        confidence=(confidence, reasons),
        what=_what(window, difference, edit),
        why=_why(difference, edit),
        next=_next(difference, edit),
        evidence=_evidence(window, difference),
        ruled_out=_ruled_out(difference),
        disproof=_disproof(difference),
        victims=difference.others.ranks if not difference.is_tie else () if ranks else everyone,
    )


def splits_finding(
    window: Window, group: str, number: int, row: Mapping[int, tuple[int, int]]
) -> Finding:
    """Return the finding of an all_to_all in which more is sent than received, or less."""
    sent = sum(one for one, _ in row.values())
    received = sum(other for _, other in row.values())
    return window.finding(
        "desync",
        f"splits/{group}",
        severity="critical",
        group=group,
        confidence=(0.8, "the sums are certain, but not which rank is wrong"),
        what=f"The splits of all_to_all #{number:,} of group {group} do not add up",
        why=f"Its {len(row)} ranks send {sent:,} bytes and expect {received:,}; what a rank sends "
        "to another must be what that one expects from it",
        next="Compare the split sizes that each rank computes before the call",
        disproof="A rank hands in a buffer larger than what its splits use",
        evidence=tuple(
            Evidence(f"Rank {rank} sends {one:,} bytes and expects {other:,}", window.link(rank))
            for rank, (one, other) in sorted(row.items())[:8]
        ),
    )


def verb_text(difference: CallDifference, edit: Edit) -> str:
    """Return what was done to which call, as in "skipped all_reduce #41 of group dp-0"."""
    number, group = difference.number + edit.place, f"of group {difference.group}"
    if edit.verb == "swapped":
        return f"swapped collectives #{number:,} and #{number + 1:,} {group}"
    if edit.verb == "skipped":
        return f"skipped {difference.others.calls[edit.place].operation} #{number:,} {group}"
    if edit.verb == "inserted":
        return f"inserted {_call(difference.culprits, edit.other).operation} #{number:,} {group}"
    mine, theirs = _call(difference.culprits, edit.other), _call(difference.others, edit.place)
    if mine.operation != theirs.operation:
        return f"called {mine.operation} in place of {theirs.operation} as #{number:,} {group}"
    wrong = _wrong_parts(mine, theirs)
    if not wrong:
        return f"called {mine.operation} #{number:,} {group} from another place"
    return f"called {mine.operation} #{number:,} {group} with a wrong {' and '.join(wrong)}"


def _wrong_parts(mine: Call, theirs: Call) -> list[str]:
    wrong = ["dtype"] * (mine.dtype != theirs.dtype)
    if theirs.size_bytes >= 0 and _elements(mine) != _elements(theirs):
        wrong.append("shape")
    wrong += ["reduce operation"] * (mine.reduce_op != theirs.reduce_op)
    return wrong + ["root"] * (mine.root != theirs.root)


def _elements(call: Call) -> int:
    return call.size_bytes // item_bytes(call.dtype) if call.size_bytes >= 0 else -1


def _call(side: Side, place: int) -> Call:
    return side.calls[min(place, len(side.calls) - 1)]


def _what(window: Window, difference: CallDifference, edit: Edit) -> str:
    step = f" in step {difference.step:,}" if difference.step else ""
    culprits, number = difference.culprits.ranks, f"#{difference.number:,}"
    if difference.is_tie:
        return (
            f"{capital(ranks_text(culprits))} and {ranks_text(difference.others.ranks)} call "
            f"different collectives as {number} of group {difference.group}{step}"
        )
    who = window.who(culprits)
    if len(difference.edits) > POLICY.desync_most_edits:
        return f"{who} left the order of calls of group {difference.group} at {number}{step}"
    return f"{who} {verb_text(difference, edit)}{step}"


def _why(difference: CallDifference, edit: Edit) -> str:
    sides = ((difference.others, edit.place), (difference.culprits, edit.other))
    both = "; ".join(_says(side, place, difference) for side, place in sides)
    if difference.is_site_only:
        return (
            f"{both}; all are of one shape, so the backend returns wrong results without an error"
        )
    if len(difference.edits) > 1:
        within = len(difference.culprits.calls)
        return f"{both}; {len(difference.edits) - 1} more calls differ within {within}"
    return both


def _says(side: Side, place: int, difference: CallDifference) -> str:
    """Return who calls what, as many calls as it takes to see the difference."""
    swapped = bool(difference.edits) and difference.edits[0].verb == "swapped"
    calls = side.calls[place : place + (2 if swapped else 1)] or side.calls[-1:]
    many = len(side.ranks) > 1
    who = f"{len(side.ranks)} ranks" if len(side.ranks) > 3 else ranks_text(side.ranks)
    if not calls:
        return f"{who} {'have' if many else 'has'} called nothing more"
    return f"{who} {'call' if many else 'calls'} " + " then ".join(map(call_text, calls))


def call_text(call: Call) -> str:
    """Return a call as people write it: all_reduce sum of 1,024 float32 from loss.py:88."""
    parts = [call.operation, call.reduce_op]
    if call.size_bytes > 0 and call.dtype != "other":
        parts.append(f"of {_elements(call):,} {call.dtype}")
    if call.root >= 0:
        parts.append(f"with root {call.root}")
    if call.site:
        parts.append(f"from {cut(call.site, _SITE_LENGTH)}")
    return " ".join(part for part in parts if part)


def _next(difference: CallDifference, edit: Edit) -> str:
    side, place = (difference.culprits, edit.other) if edit.verb == "inserted" else (
        difference.others, edit.place)  # fmt: skip
    site = _call(side, place).site if side.calls else ""
    at = f" at {cut(site, _SITE_LENGTH)}" if site else ""
    if difference.is_tie:
        return f"Compare the two calls{at}: which of them should be there is not for us to say"
    who = ranks_text(difference.culprits.ranks)
    if edit.verb == "swapped":
        return f"Order the two calls{at} alike on all ranks: look for a branch that {who} takes"
    if edit.verb == "skipped":
        return f"Find the condition by which {who} passed over the call{at}; all ranks must call it"
    if edit.verb == "inserted":
        return f"Find why {who} alone makes the call{at}; either all ranks call it or none"
    return f"Print what {who} hands to the call{at} and compare it with another rank"


def _evidence(window: Window, difference: CallDifference) -> tuple[Evidence, ...]:
    facts = []
    for side in (difference.culprits, difference.others):
        shown = " | ".join(call_text(call) for call in side.calls[:_SHOWN_CALLS])
        text = f"{capital(ranks_text(side.ranks))} from #{difference.number:,} on: {shown}"
        facts.append(Evidence(text, window.link(side.ranks[0], difference.step or None)))
    return tuple(facts)


def _ruled_out(difference: CallDifference) -> tuple[str, ...]:
    out = ["A late rank: it did call, and called something else"]
    if difference.is_site_only:
        out.append("A line of its own for the same call: it also calls from the others' lines")
    return tuple(out)


def _disproof(difference: CallDifference) -> str:
    if difference.is_site_only:
        return "The two calls may come in any order, because their results are used alike"
    if difference.is_foretold or difference.is_tie:
        return "The program changed at this point, and the other side is what it did before"
    return "The agent began to count at another call on this rank than on the others"


def _confidence(difference: CallDifference) -> tuple[float, str]:
    if difference.is_tie:
        return 0.4, "as many ranks call the one as the other, and neither is what came before"
    if difference.is_foretold:
        return 0.7, "as many ranks call the one as the other; the others go on as in earlier steps"
    if len(difference.edits) > POLICY.desync_most_edits:
        return 0.75, "most ranks agree, but one slip does not explain the difference"
    if difference.is_site_only:
        return 0.85, "the calls come from the same lines in another order, all else is equal"
    return 0.95, f"{len(difference.others.ranks)} of {difference.num_present} ranks called the same"


def _is_habit(window: Window, difference: CallDifference) -> bool:
    """Return whether only places in the code differ, from the first step on and in later ones."""
    if not difference.is_site_only:
        return False
    track = window.calls.tracks[difference.group]
    steps = {step for step, _ in track.first.values()}
    first = int(window.steps.steps[0]) if window.steps.num_steps else 1
    return 0 < difference.step <= first and len(steps) >= 3
