"""How one sequence of calls came out of another: skipped, inserted, swapped, replaced.

Optimal string alignment (Damerau-Levenshtein without overlapping swaps), with both ends open:
calls that have not happened yet are no edit. Of equally short explanations the one counts that
makes more calls equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verb: TypeAlias = Literal["skipped", "inserted", "swapped", "replaced"]
DEPTH = 64  # operations that are aligned
_EDIT, _MATCH, _UNLIKELY = 1024, 4, 1  # an edit outweighs all matches, a match all doubts
_CONTEXT = 8  # calls that must be alike before the next one is foretold


@dataclass(frozen=True, slots=True)
class Edit:
    """One difference. `place` counts in the reference, `other` in the actual sequence, from 0."""

    verb: Verb
    place: int
    other: int


def align(
    reference: Sequence[int], actual: Sequence[int], is_alike: Callable[[int, int], bool]
) -> list[Edit]:
    """Return the fewest edits that make `actual` of `reference`, in order.

    `is_alike` says of two different calls whether one may be the other with a wrong argument.
    """
    rows, columns = len(reference), len(actual)
    cost = [[0] * (columns + 1) for _ in range(rows + 1)]
    step: list[list[Verb | None]] = [[None] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows + 1):
        for j in range(columns + 1):
            if i or j:
                cost[i][j], step[i][j] = _best(reference, actual, cost, i, j, is_alike)
    ends = [(cost[rows][j], -rows - j, rows, j) for j in range(columns + 1)]
    ends += [(cost[i][columns], -i - columns, i, columns) for i in range(rows)]
    _, _, i, j = min(ends)
    return _walk_back(reference, actual, step, i, j)


def _best(
    reference: Sequence[int], actual: Sequence[int], cost: list[list[int]], i: int, j: int,
    is_alike: Callable[[int, int], bool],
) -> tuple[int, Verb | None]:  # fmt: skip
    """Return the least cost of a cell and its last step; None is a match."""
    if i and j and reference[i - 1] == actual[j - 1]:
        return cost[i - 1][j - 1] - _MATCH, None
    found: list[tuple[int, int, Verb]] = []
    if i and j:
        doubt = 0 if is_alike(reference[i - 1], actual[j - 1]) else 2 * _UNLIKELY
        found.append((cost[i - 1][j - 1] + _EDIT + doubt, 0, "replaced"))
    if i > 1 and j > 1 and reference[i - 2] == actual[j - 1] and reference[i - 1] == actual[j - 2]:
        found.append((cost[i - 2][j - 2] + _EDIT - 2 * _MATCH, 1, "swapped"))
    if i:
        found.append((cost[i - 1][j] + _EDIT + _UNLIKELY, 2, "skipped"))
    if j:
        found.append((cost[i][j - 1] + _EDIT + _UNLIKELY, 3, "inserted"))
    value, _, verb = min(found)
    return value, verb


def _walk_back(
    reference: Sequence[int], actual: Sequence[int], step: list[list[Verb | None]], i: int, j: int
) -> list[Edit]:
    edits: list[Edit] = []
    while i or j:
        verb = step[i][j]
        di, dj = {None: (1, 1), "replaced": (1, 1), "swapped": (2, 2), "skipped": (1, 0),
                  "inserted": (0, 1)}[verb]  # fmt: skip
        i, j = i - di, j - dj
        if verb is not None:
            edits.append(Edit(verb, i, j))
    return edits[::-1]


def foretell(history: Sequence[int], count: int) -> list[int]:
    """Return what came next when the last calls were last seen before, `count` calls at most.

    A training loop repeats itself; empty where it has not done so yet.
    """
    known = list(history)
    for length in range(min(_CONTEXT, len(known) - 1), 0, -1):
        context = known[-length:]
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == context:
                period = len(known) - end
                return [known[end + n % period] for n in range(count)]
    return []
