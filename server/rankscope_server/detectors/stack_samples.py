"""Where a slow rank is again and again while a healthy one is not, by stacks of both.

The server asks for some stacks of a suspect and of a rank that waits for it (`ask_of_the_slow`).
faulthandler and py-spy write them; the functions that only the suspect is in say what it does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rankscope.schema import Stacks

LEAST = 4  # stacks of each of both ranks
LEAST_DIFFERENCE = 0.5  # of the shares of stacks that show a function
_FRAMES = (
    re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE),
    re.compile(r"^\s+(?P<name>\S+) \((?P<file>[^():]+):(?P<line>\d+)\)", re.MULTILINE),  # py-spy
)
# what is inside is the library's; who called it is the script's
_OF_LIBRARIES = ("/torch/", "/rankscope/", "/threading.py", "<frozen", "/site-packages/")


@dataclass(frozen=True, slots=True)
class StackSample:
    """The script's functions in one dump of stacks: (file, function) -> line, innermost first."""

    time_ns: int
    functions: Mapping[tuple[str, str], int]

    @classmethod
    def of(cls, stacks: Stacks) -> StackSample:
        """Read the text of a dump, once: it may be long."""
        return cls(stacks.time_ns, _functions(stacks.text))


@dataclass(frozen=True, slots=True)
class Difference:
    """A function that one rank is in and the other is not; counts are stacks."""

    function: str
    file: str
    line: int  # most often
    mine: int
    num_mine: int
    theirs: int
    num_theirs: int

    def text(self, rank: int, other: int) -> str:
        """Return it as a sentence."""
        return (
            f"In {self.mine} of {self.num_mine} stacks rank {rank} is in {self.function} "
            f"({PurePath(self.file).name}:{self.line}), rank {other} in {self.theirs} of "
            f"{self.num_theirs}"
        )


def difference(
    samples: Mapping[int, Sequence[StackSample]], rank: int, others: Sequence[int], since_ns: float
) -> tuple[int, Difference] | None:
    """Return the other rank that was sampled, and the innermost function that tells them apart.

    None where there are too few stacks, or none of the script's functions does.
    """
    mine = _since(samples, rank, since_ns)
    for other in others:
        theirs = _since(samples, other, since_ns)
        if len(mine) >= LEAST and len(theirs) >= LEAST:
            found = _differing(mine, theirs)
            return None if found is None else (other, found)
    return None


def _since(
    samples: Mapping[int, Sequence[StackSample]], rank: int, since_ns: float
) -> list[Mapping[tuple[str, str], int]]:
    return [sample.functions for sample in samples.get(rank, ()) if sample.time_ns >= since_ns]


def _differing(
    own: Sequence[Mapping[tuple[str, str], int]], other: Sequence[Mapping[tuple[str, str], int]]
) -> Difference | None:
    seen, elsewhere = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    depth, lines = Counter[tuple[str, str]](), Counter[tuple[str, str, int]]()
    for functions in own:
        for place, (key, line) in enumerate(functions.items()):
            seen[key] += 1
            depth[key] += place
            lines[*key, line] += 1
    for functions in other:
        elsewhere.update(functions.keys())
    apart = [
        key
        for key, count in seen.items()
        if count / len(own) - elsewhere[key] / len(other) >= LEAST_DIFFERENCE
    ]
    if not apart:
        return None
    file, name = min(apart, key=lambda key: (depth[key] / seen[key], key))
    line = max((one for one in lines if one[:2] == (file, name)), key=lambda one: lines[one])[2]
    key = (file, name)
    return Difference(name, file, line, seen[key], len(own), elsewhere[key], len(other))


def _functions(text: str) -> dict[tuple[str, str], int]:
    """Return (file, function) of the script's frames, innermost first, each with its line."""
    found: dict[tuple[str, str], int] = {}
    for frame in _FRAMES:
        for match in frame.finditer(text):
            if not any(mark in match["file"] for mark in _OF_LIBRARIES):
                found.setdefault((match["file"], match["name"]), int(match["line"]))
    return found
