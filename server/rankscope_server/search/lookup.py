"""Which terms of the index a block must hold for one of its lines to match: never too many.

The index narrows; the texts of the blocks that are left are searched for the rest. What no term
can narrow (a negation, a text of two letters within words) gives None: any block may match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rankscope_server.search.literals import NoLiteralError, literals_of
from rankscope_server.search.pairs import pairs_of
from rankscope_server.search.tree import And, Node, Or, Regex, Text
from rankscope_server.search.words import RUN, TRIGRAM, index_term, trigrams

MIN_PREFIX = 3  # of fewer letters the index would read a large part of itself
MAX_TRIGRAMS = 12  # of one run; more narrow no further
_READ_OTHERWISE = ("[:", "[[", "--", "&&", "||", "~~")  # by the parser of `re` than by RE2


@dataclass(frozen=True, slots=True)
class Term:
    """A term, or the beginning of one."""

    text: str
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class AllOf:
    """Blocks that hold all of these."""

    of: tuple[Lookup, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Blocks that hold one of these."""

    of: tuple[Lookup, ...]


Lookup: TypeAlias = Term | AllOf | AnyOf


def lookup_of(node: Node) -> Lookup | None:
    """Return what a block must hold; None where any block may match."""
    if isinstance(node, Text):
        return _all(_text_terms(node))
    if isinstance(node, Regex):
        return _regex_lookup(node)
    if isinstance(node, And):
        return _all(lookup for child in node.nodes if (lookup := lookup_of(child)) is not None)
    if isinstance(node, Or):
        found = [lookup_of(child) for child in node.nodes]
        known = tuple(lookup for lookup in found if lookup is not None)
        return AnyOf(known) if known and len(known) == len(found) else None
    return None


def _all(lookups: Iterable[Lookup]) -> Lookup | None:
    known = tuple(dict.fromkeys(lookups))
    return AllOf(known) if known else None


def _text_terms(node: Text) -> list[Lookup]:
    text = node.text if node.text.isascii() else ""  # others have letters of other cases
    whole = text.rstrip("0123456789") if node.is_open_right else text
    terms: list[Lookup] = [Term(term) for term in sorted(pairs_of(whole.encode()))]
    for match in RUN.finditer(node.text):
        run = match.group()
        is_open_left = node.is_open_left and match.start() == 0
        is_open_right = node.is_open_right and match.end() == len(node.text)
        if not is_open_left and not is_open_right:
            terms.append(Term(index_term(run)))
        elif not is_open_left and len(index_term(run)) >= MIN_PREFIX:
            terms.append(Term(index_term(run), is_prefix=True))
        else:
            terms += _trigram_terms(run)
    return terms


def _trigram_terms(run: str) -> list[Lookup]:
    return [Term(TRIGRAM + gram) for gram in sorted(trigrams(run))[:MAX_TRIGRAMS]]


def _regex_lookup(node: Regex) -> Lookup | None:
    if any(text in node.pattern for text in _READ_OTHERWISE):
        return None
    try:
        literals = literals_of(node.pattern)
    except (NoLiteralError, re.error, RecursionError, OverflowError):
        return None  # also what RE2 understands and the parser of `re` does not
    found = [
        _all(term for run in RUN.findall(literal) for term in _trigram_terms(run))
        for literal in literals
    ]
    known = tuple(lookup for lookup in found if lookup is not None)
    return AnyOf(known) if known and len(known) == len(found) else None
