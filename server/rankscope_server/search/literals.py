"""Which fixed texts a line must hold for a regular expression to match: the fast first filter.

A large log is first searched for these texts, all at once; only lines that hold one of them are
looked at by `re`. The idea is that of filtered_re2 in https://github.com/google/re2.
"""

from __future__ import annotations

import importlib
from typing import Any

# The parser of `re` itself, by name: it has no types, and its old name `sre_parse` is deprecated.
codes: Any = importlib.import_module("re._constants")
parser: Any = importlib.import_module("re._parser")
MIN_LITERAL = 3
# Words of healthy lines: a filter that lets them pass would pass everything.
_COMMON = frozenset(
    """
    all both built checkpoint cuda data device disk down error errors event exit expect expects
    fabric failed finite found gloo grad gradient gradients inf info interface job kill
    local_rank loss mean memory node norm nvlink params port rank ranks remote scale signal step
    taken time train value values version worker
    """.split()
)


class NoLiteralError(ValueError):
    """A pattern can match without any fixed text of some length, so it cannot be searched fast."""


def literals_of(pattern: str) -> tuple[str, ...]:
    """Return lower-case texts of which every match of `pattern` holds at least one."""
    found = _of(list(parser.parse(pattern)))
    if found is None:
        raise NoLiteralError(
            f"every way to match needs a fixed text of at least {MIN_LITERAL} characters"
        )
    return tuple(sorted(found))


def _of(items: list[Any]) -> frozenset[str] | None:
    """Return the best set of texts for a sequence: the one whose shortest text is longest."""
    options: list[frozenset[str]] = []
    run = ""
    for code, value in items:
        if code is codes.LITERAL and value < 128:
            run += chr(value).lower()
            continue
        options += _long(run)
        run = ""
        if (deeper := _inside(code, value)) is not None:
            options.append(deeper)
    options += _long(run)
    return max(options, key=_worth, default=None)


def _inside(code: Any, value: Any) -> frozenset[str] | None:
    if code is codes.SUBPATTERN:
        return _of(list(value[-1]))
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and value[0] >= 1:
        return _of(list(value[2]))
    if code is codes.BRANCH:
        branches = [_of(list(branch)) for branch in value[1]]
        known = [branch for branch in branches if branch is not None]
        return frozenset().union(*known) if len(known) == len(branches) else None
    return None


def _long(run: str) -> list[frozenset[str]]:
    text = run.strip()
    return [frozenset({text})] if len(text) >= MIN_LITERAL else []


def _worth(texts: frozenset[str]) -> tuple[int, int]:
    return min(0 if text in _COMMON else len(text) for text in texts), -len(texts)
