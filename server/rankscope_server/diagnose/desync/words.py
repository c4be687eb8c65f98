"""What the desync detector says of calls that differ."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.wire.formulas import item_bytes
from rankscope_server.diagnose.shared.call_differences import Difference, Side
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.text import capital, confidence_word, cut, place_text, ranks_text
from rankscope_server.observe.alignment import Edit
from rankscope_server.observe.calls import Call

_SITE_LENGTH = 90
_MANY_EDITS = 3  # more than that is another program, not a slip
_SHOWN_CALLS = 5


def desync_finding(window: Window, found: Difference) -> Finding:
    """Return the finding of a group's first difference."""
    edit = found.edits[0] if found.edits else Edit("replaced", 0, 0)
    everyone = tuple(sorted((*found.culprits.ranks, *found.others.ranks)))
    ranks = everyone if found.is_tie else found.culprits.ranks
    confidence, reasons = _confidence(found)
    name = "+".join(str(rank) for rank in ranks[:16])
    if found.is_tie and found.num_present < found.num_members:
        ranks = ()  # the calls of the other members, who could tell, never came
    return Finding(
        key=f"{window.attempt}/desync/desync/{found.group}/{name}",
        detector="desync",
        kind="desync",
        severity="info" if _is_habit(window, found) else "critical",
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        group=found.group,
        onset_step=found.step or None,
        onset_ms=found.time_ns / 1e6,
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reasons}",
        what=_what(window, found, edit),
        why=_why(found, edit),
        next=_next(found, edit),
        evidence=_evidence(window, found),
        ruled_out=_ruled_out(found),
        would_be_wrong_if=_wrong_if(found),
        policy_hash=window.policy.hash,
        victims=found.others.ranks if not found.is_tie else () if ranks else everyone,
    )


def splits_finding(
    window: Window, group: str, number: int, row: Mapping[int, tuple[int, int]]
) -> Finding:
    """Return the finding of an all_to_all in which more goes in than comes out, or less."""
    sent = sum(one for one, _ in row.values())
    received = sum(other for _, other in row.values())
    return Finding(
        key=f"{window.attempt}/desync/splits/{group}",
        detector="desync",
        kind="desync",
        severity="critical",
        attempt=window.attempt,
        group=group,
        confidence=0.8,
        confidence_text="medium: the sums are certain, which rank is wrong they do not tell",
        what=f"The splits of all_to_all #{number:,} of group {group} do not add up",
        why=f"Its {len(row)} ranks send {sent:,} bytes and expect {received:,}; what a rank sends "
        "to another must be what that one expects from it",
        next="Compare the split sizes that each rank computes before the call",
        would_be_wrong_if="A rank hands in a buffer larger than what its splits use",
        evidence=tuple(
            Evidence(f"Rank {rank} sends {one:,} bytes and expects {other:,}", window.link(rank))
            for rank, (one, other) in sorted(row.items())[:8]
        ),
        policy_hash=window.policy.hash,
    )


def verb_text(found: Difference, edit: Edit) -> str:
    """Return what was done to which call, as in "skipped all_reduce #41 of group dp-0"."""
    number, group = found.number + edit.place, f"of group {found.group}"
    if edit.verb == "swapped":
        return f"swapped collectives #{number:,} and #{number + 1:,} {group}"
    if edit.verb == "skipped":
        return f"skipped {found.others.calls[edit.place].operation} #{number:,} {group}"
    if edit.verb == "inserted":
        return f"inserted {_call(found.culprits, edit.other).operation} #{number:,} {group}"
    mine, theirs = _call(found.culprits, edit.other), _call(found.others, edit.place)
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


def _what(window: Window, found: Difference, edit: Edit) -> str:
    step = f" in step {found.step:,}" if found.step else ""
    if found.is_tie:
        return (
            f"{capital(ranks_text(found.culprits.ranks))} and {ranks_text(found.others.ranks)} "
            f"call different collectives as #{found.number:,} of group {found.group}{step}"
        )
    who = capital(place_text(found.culprits.ranks, window.hosts(found.culprits.ranks)))
    if len(found.edits) > _MANY_EDITS:
        return f"{who} left the order of calls of group {found.group} at #{found.number:,}{step}"
    return f"{who} {verb_text(found, edit)}{step}"


def _why(found: Difference, edit: Edit) -> str:
    both = f"{_says(found.others, edit.place, found)}; {_says(found.culprits, edit.other, found)}"
    if found.is_site_only:
        return (
            f"{both}; all are of one shape, so the backend returns wrong results without an error"
        )
    if len(found.edits) > 1:
        return (
            f"{both}; {len(found.edits) - 1} more calls differ within {len(found.culprits.calls)}"
        )
    return both


def _says(side: Side, place: int, found: Difference) -> str:
    """Return who calls what, as many calls as it takes to see the difference."""
    swapped = bool(found.edits) and found.edits[0].verb == "swapped"
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


def _next(found: Difference, edit: Edit) -> str:
    side, place = (found.culprits, edit.other) if edit.verb == "inserted" else (
        found.others, edit.place)  # fmt: skip
    site = _call(side, place).site if side.calls else ""
    at = f" at {cut(site, _SITE_LENGTH)}" if site else ""
    if found.is_tie:
        return f"Compare the two calls{at}: which of them should be there is not for us to say"
    who = ranks_text(found.culprits.ranks)
    if edit.verb == "swapped":
        return f"Order the two calls{at} alike on all ranks: look for a branch that {who} takes"
    if edit.verb == "skipped":
        return f"Find the condition by which {who} passed over the call{at}; all ranks must call it"
    if edit.verb == "inserted":
        return f"Find why {who} alone makes the call{at}; either all ranks call it or none"
    return f"Print what {who} hands to the call{at} and compare it with another rank"


def _evidence(window: Window, found: Difference) -> tuple[Evidence, ...]:
    facts = []
    for side in (found.culprits, found.others):
        shown = " | ".join(call_text(call) for call in side.calls[:_SHOWN_CALLS])
        text = f"{capital(ranks_text(side.ranks))} from #{found.number:,} on: {shown}"
        facts.append(Evidence(text, window.link(side.ranks[0], found.step or None)))
    return tuple(facts)


def _ruled_out(found: Difference) -> tuple[str, ...]:
    out = ["A rank that is merely late: it did call, and called something else"]
    if found.is_site_only:
        out.append("A line of its own for the same call: it also calls from the others' lines")
    return tuple(out)


def _wrong_if(found: Difference) -> str:
    if found.is_site_only:
        return "The two calls may come in any order, because their results are used alike"
    if found.is_foretold or found.is_tie:
        return "The program changed what it does at this point, and the other side is the old way"
    return "The agent began to count at another call on this rank than on the others"


def _confidence(found: Difference) -> tuple[float, str]:
    if found.is_tie:
        return 0.4, "as many ranks call the one as the other, and neither is what came before"
    if found.is_foretold:
        return 0.7, "as many ranks call the one as the other; the others go on as in earlier steps"
    if len(found.edits) > _MANY_EDITS:
        return 0.75, "most ranks agree, but one slip does not explain the difference"
    if found.is_site_only:
        return 0.85, "the calls come from the same lines in another order, all else is equal"
    return 0.95, f"{len(found.others.ranks)} of {found.num_present} ranks called the same"


def _is_habit(window: Window, found: Difference) -> bool:
    """Return whether only places in the code differ, from the first step on and in later ones."""
    if not found.is_site_only:
        return False
    track = window.calls.tracks[found.group]
    steps = {step for step, _ in track.first.values()}
    first = int(window.steps.steps[0]) if window.steps.num_steps else 1
    return 0 < found.step <= first and len(steps) >= 3
