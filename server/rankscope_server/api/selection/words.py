"""Sentences about some ranks in some steps."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from rankscope_server.api.selection.common import Array
from rankscope_server.api.selection.schema import Reference, Selection, Shared
from rankscope_server.text import duration_text, plural

_TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_RANGES = 3
_MOST_SHARED = 3
_MOST_OF = 0.5  # of the excess, to say that it is in this phase
_CHANGED = 1.08  # as the least that the map colours


def ranges_of(chosen: Array) -> Iterator[tuple[int, int]]:
    """Yield the first and the last rank of each run of chosen ones."""
    ranks = np.flatnonzero(chosen)
    for part in np.split(ranks, np.flatnonzero(np.diff(ranks) != 1) + 1):
        if len(part):
            yield int(part[0]), int(part[-1])


def ranges_text(chosen: Array) -> str:
    """Return ranks as an address takes them: "0-63,70"."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges_of(chosen))


def ranks_text(chosen: Array) -> str:
    """Return "rank 5", "ranks 8-15" or "all 64 ranks"; of many ranges the first ones."""
    if chosen.all() and len(chosen) > 1:
        return f"all {len(chosen):,} ranks"
    ranges = list(ranges_of(chosen))
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:_MOST_RANGES]]
    more = sum(high - low + 1 for low, high in ranges[_MOST_RANGES:])
    noun = "rank" if chosen.sum() == 1 else "ranks"
    return f"{noun} {', '.join(parts)}" + (f" and {more:,} more" if more else "")


_REFERENCES: dict[Reference, str] = {
    "others": "the other ranks with the same role in the same steps",
    "other roles": "ranks of other stages in the same steps: none of the same one is left",
    "peers": "the median of the ranks with the same role in the same step",
    "own": "their own early steps",
}


def reference_text(reference: Reference | None) -> str:
    """Return what the selected ranks are compared with."""
    return "" if reference is None else _REFERENCES[reference]


def notes(world_size: int, *, has_groups: bool, num_facts: int) -> list[str]:
    """Return what is not recorded and could be in common."""
    found = []
    if not has_groups:
        found.append("No process group is recorded.")
    if num_facts < world_size:
        who = f"{world_size - num_facts:,} of {world_size:,} ranks" if num_facts else "No rank"
        found.append(f"{who} sent {'no' if num_facts else 'its'} environment.")
    return found


def with_text(answer: Selection) -> Selection:
    """Return an answer with its sentence."""
    steps = (
        f"step {answer.step_lo:,}"
        if answer.step_lo == answer.step_hi
        else f"steps {answer.step_lo:,}-{answer.step_hi:,}"
    )
    who = f"{answer.ranks_text[:1].upper()}{answer.ranks_text[1:]}"
    if answer.num_ranks == 1 and answer.hosts:
        who += f" on {answer.hosts[0]}"
    parts = [_deviation(answer), _shared(answer), _lines(answer), _errors(answer)]
    parts.append(_counted(_total(answer), "finding"))
    text = f"{who}, {steps}: {'; '.join(part for part in parts if part)}."
    return msgspec.structs.replace(answer, text=text)


def _counted(count: int, noun: str) -> str:
    return plural(count, noun) if count else f"no {noun}"


def _total(answer: Selection) -> int:
    return answer.findings_capped.total if answer.findings_capped else len(answer.findings)


def times_text(ratio: float) -> str:
    """Return "1.4x slower", "1.2x faster" or "as fast" with its ratio."""
    if ratio >= 1:
        return f"{ratio:.2g}{_TIMES} slower" if ratio >= 1.095 else f"{ratio:.2f}{_TIMES} slower"
    return f"{1 / ratio:.2g}{_TIMES} faster" if ratio <= 0.91 else f"{1 / ratio:.2f}{_TIMES} faster"


def z_text(z: float | None) -> str:
    """Return "robust z 6.2"; empty where it is not known."""
    if z is None:
        return ""
    digits = 1 if abs(z) < 9.95 else 0
    return f"robust z {round(z, digits) + 0.0:.{digits}f}"


def _deviation(answer: Selection) -> str:
    if answer.ratio is None:
        return "no self time is known here"
    slow, before = answer.slow, answer.before_ratio
    is_part = slow is not None and slow.count < answer.num_ranks
    text = _compared(answer, answer.ratio) or "no rank is slower than its peers"
    if before is not None and not 1 / _CHANGED <= before <= _CHANGED:
        together = "all together " if is_part else ""
        but = "but" if answer.is_usual and not is_part else "and"
        text += f", {but} {together}{times_text(before)} than in the steps before"
    num_steps = answer.step_hi - answer.step_lo + 1
    if answer.num_steps_read < num_steps:
        text += f" ({answer.num_steps_read:,} of the {num_steps:,} steps were read)"
    return text


def _compared(answer: Selection, ratio: float) -> str:
    """Return how self time compares; empty where all ranks are as their peers."""
    slow, than = answer.slow, _than(answer)
    if slow is not None and slow.count * 2 <= answer.num_ranks:  # the middle rank is none of them
        verb = "is" if slow.count == 1 else "are up to"
        text = f"{slow.text} {verb} {times_text(slow.ratio)} than {than}"
        rest = answer.num_ranks - slow.count
        return text if answer.reference == "peers" else f"{text}, the other {rest:,} not"
    if answer.reference == "peers":
        return ""
    if answer.is_usual:
        return f"as fast as {than} ({ratio:.2f}{_TIMES}{_z(answer)}, usual in this run)"
    text = f"{times_text(ratio)} than {than}"
    text += f" ({z_text(answer.z)})" if answer.z is not None else ""
    text += _phase(answer)
    if slow is not None and slow.count < answer.num_ranks:
        text += f", {slow.count:,} of {answer.num_ranks:,} ranks"
    return text


def _than(answer: Selection) -> str:
    if answer.reference == "others":
        one = answer.world_size - answer.num_ranks == 1
        return f"the other rank{'' if one else 's'} in the same steps"
    if answer.reference == "other roles":
        return "ranks of other stages in the same steps"
    if answer.reference == "peers":
        return "its peers" if answer.slow and answer.slow.count == 1 else "their peers"
    return "in early steps"


def _z(answer: Selection) -> str:
    return f", {z_text(answer.z)}" if answer.z is not None else ""


def _phase(answer: Selection) -> str:
    if answer.self_ms is None or answer.others_ms is None or not answer.phases:
        return ""
    first, excess = answer.phases[0], answer.self_ms - answer.others_ms
    if first.extra_ms * excess <= 0 or abs(first.extra_ms) < _MOST_OF * abs(excess):
        return ""
    more = "longer" if excess > 0 else "shorter"
    return f", most of it {first.phase}: {duration_text(abs(first.extra_ms))} {more}"


def _shared(answer: Selection) -> str:
    if answer.num_ranks == answer.world_size:
        return ""
    named = [one for one in answer.common if one.kind not in ("finding", "error")]
    every = "all " if answer.num_ranks > 1 else ""
    alone = [one.text for one in named if not one.num_others][:_MOST_SHARED]
    parts = []
    if alone:
        parts.append(f"{every}{_listed(alone)}, as no other rank is")
    few = [one for one in named if one.num_others][: _MOST_SHARED - len(alone)]
    parts += [f"{every}{one.text}, as {_too(one)}" for one in few]
    more = len(named) - len(alone) - len(few)
    if more > 0:
        parts.append(f"{more:,} more in common")
    if not named and answer.num_ranks > 1:
        return "nothing recorded is in common that the others have not"
    return "; ".join(parts)


def _too(one: Shared) -> str:
    return f"are {one.num_others:,} of the other {one.num_others_known:,} ranks"


def _listed(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _lines(answer: Selection) -> str:
    if answer.num_lines is None:
        return ""
    least = "at least " if answer.lines_are_at_least else ""
    return f"{least}{_counted(answer.num_lines, 'log line')} at warning or worse"


def _errors(answer: Selection) -> str:
    count = sum(one.count for one in answer.errors)
    if not count:
        return ""
    kinds = ", ".join(dict.fromkeys(one.type for one in answer.errors[:_MOST_SHARED]))
    return f"{plural(count, 'error')} ({kinds})"
