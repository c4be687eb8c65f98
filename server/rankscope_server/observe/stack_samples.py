"""Where a slow rank is again and again while a healthy one is not, by stacks of both.

The server asks for some stacks of a suspect and of a rank that waits for it (`ask_of_the_slow`).
faulthandler and py-spy write them; the functions that only the suspect is in say what it does, or,
where all its work is in one function, the lines.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rankscope.wire.schema import Stacks
from rankscope_server.findings.policy import POLICY, Policy

_FRAMES = (
    re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE),
    re.compile(r"^\s+(?P<name>\S+) \((?P<file>[^():]+):(?P<line>\d+)\)", re.MULTILINE),  # py-spy
)
# What is inside is the library's; who called it is the script's. A folder of the user's may well be
# called torch or rankscope: by these names alone only checkouts of both are known.
_OF_LIBRARIES = (
    "/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "/pytorch/torch/",
    "/agent/rankscope/",
)  # fmt: skip
# a thread with such a frame computes the model, waits for a batch or for other ranks
_COMPUTES = re.compile(
    r"/torch/(nn|autograd|optim|utils/data|_dynamo|_inductor|_functorch|distributed(?!/(elastic|run)))"
    r"[/.]|/torch/_tensor\.py.* in backward$|\bbackward \(\S*/torch/_tensor\.py",
    re.MULTILINE,
)
_THREAD = re.compile(r"^(?=(?:Current )?[Tt]hread )", re.MULTILINE)
_Place = tuple[str, str, int]  # file, function, line; 0: any line of the function


@dataclass(frozen=True, slots=True)
class StackSample:
    """The script's functions in one dump of stacks: (file, function) -> line, innermost first."""

    time_ns: int
    functions: Mapping[tuple[str, str], int]
    outside: frozenset[tuple[str, str]]  # those in which a thread is while torch does no work in it

    @classmethod
    def of(cls, stacks: Stacks) -> StackSample:
        """Read the text of a dump, once: it may be long."""
        threads = [(_functions(text), text) for text in _THREAD.split(stacks.text)]
        functions: dict[tuple[str, str], int] = {}
        for found, _ in threads:
            functions |= {key: line for key, line in found.items() if key not in functions}
        outside = {one for found, text in threads if not _COMPUTES.search(text) for one in found}
        return cls(stacks.time_ns, functions, frozenset(outside))


@dataclass(frozen=True, slots=True)
class StackDifference:
    """A function or line that one rank is in and the other is not; counts are stacks."""

    function: str
    file: str
    line: int  # most often
    mine: int
    num_mine: int
    theirs: int
    num_theirs: int
    is_line: bool  # both are in the function, on different lines
    is_outside: bool  # mostly, torch does no work in it: neither the model's nor a collective's

    @property
    def where(self) -> str:
        """Return the function with its file and line."""
        return f"{self.function} ({PurePath(self.file).name}:{self.line})"

    def text(self, rank: int, other: int) -> str:
        """Return it as a sentence."""
        return (
            f"In {self.mine} of {self.num_mine} stacks rank {rank} is "
            f"{'at this line of' if self.is_line else 'in'} {self.where}, rank {other} in "
            f"{self.theirs} of {self.num_theirs}"
        )


def difference(
    samples: Mapping[int, Sequence[StackSample]],
    rank: int,
    others: Sequence[int],
    since_ns: float,
    policy: Policy = POLICY,
) -> tuple[int, StackDifference] | None:
    """Return the other rank that was sampled, and the innermost function in which they differ.

    The innermost line where no function does. None where there are too few stacks, or neither does.
    """
    mine, least = _since(samples, rank, since_ns), policy.stacks_least
    for other in others:
        theirs = _since(samples, other, since_ns)
        if len(mine) >= least and len(theirs) >= least:
            found = _differing(mine, theirs, policy, by_line=False)
            found = found or _differing(mine, theirs, policy, by_line=True)
            return None if found is None else (other, found)
    return None


def _since(
    samples: Mapping[int, Sequence[StackSample]], rank: int, since_ns: float
) -> list[StackSample]:
    return [sample for sample in samples.get(rank, ()) if sample.time_ns >= since_ns]


def _differing(
    own: Sequence[StackSample], other: Sequence[StackSample], policy: Policy, *, by_line: bool
) -> StackDifference | None:
    seen, elsewhere, depth = Counter[_Place](), Counter[_Place](), Counter[_Place]()
    for sample in own:
        for inwards, place in enumerate(_places(sample, by_line=by_line)):
            seen[place] += 1
            depth[place] += inwards
    for sample in other:
        elsewhere.update(_places(sample, by_line=by_line))
    apart = [
        place
        for place, count in seen.items()
        if count / len(own) - elsewhere[place] / len(other) >= policy.stacks_share
        and by_chance(count, len(own), elsewhere[place], len(other)) <= policy.stacks_chance
    ]
    if not apart:
        return None
    place = min(apart, key=lambda place: (depth[place] / seen[place], place))
    file, name, line = place
    there = [sample for sample in own if place in _places(sample, by_line=by_line)]
    if not by_line:
        ((line, _),) = Counter(sample.functions[file, name] for sample in there).most_common(1)
    outside = sum((file, name) in sample.outside for sample in there)
    return StackDifference(
        name, file, line, seen[place], len(own), elsewhere[place], len(other), by_line,
        2 * outside > len(there),
    )  # fmt: skip


def by_chance(mine: int, num_mine: int, theirs: int, num_theirs: int) -> float:
    """Return how likely so many of the hits are mine by chance (Fisher's exact test, one-sided)."""
    hits = mine + theirs
    ways = [
        math.comb(num_mine, n) * math.comb(num_theirs, hits - n)
        for n in range(mine, min(num_mine, hits) + 1)
    ]
    return sum(ways) / math.comb(num_mine + num_theirs, hits)


def _places(sample: StackSample, *, by_line: bool) -> list[_Place]:
    """Return the functions of a stack, innermost first, or the lines in them."""
    return [(*function, line if by_line else 0) for function, line in sample.functions.items()]


def _functions(text: str) -> dict[tuple[str, str], int]:
    """Return (file, function) of the script's frames, innermost first, each with its line."""
    found: dict[tuple[str, str], int] = {}
    for frame in _FRAMES:
        for match in frame.finditer(text):
            if not any(mark in match["file"] for mark in _OF_LIBRARIES):
                found.setdefault((match["file"], match["name"]), int(match["line"]))
    return found
