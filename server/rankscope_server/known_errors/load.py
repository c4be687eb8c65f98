"""Reads the known errors: our entries, and those that a user adds or replaces in a file."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope_server.known_errors.entry import EntryError, KnownError, entry_of

_MAX_CACHED = 4096  # of forms of lines; a log has some hundred
_NO_DIGITS = str.maketrans("", "", "0123456789")
_DIGIT = re.compile(r"\d").search
_OURS = Path(__file__).parent / "entries"


class EntryFileError(ValueError):
    """A file of entries cannot be read; the text names the file, the entry and the field."""


@dataclass(frozen=True)
class KnownErrors:
    """All entries in order; an entry before another wins where both recognise a line alike."""

    entries: tuple[KnownError, ...]
    _by_literal: dict[str, list[KnownError]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table: dict[str, list[KnownError]] = {}
        for entry in self.entries:
            for literal in {one for some in entry.literals for one in some}:
                table.setdefault(literal, []).append(entry)
        object.__setattr__(self, "_by_literal", table)

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts to search for, lower case."""
        return tuple(sorted(self._by_literal))

    def named(self, name: str) -> KnownError:
        """Return the entry with this id."""
        return next(entry for entry in self.entries if entry.id == name)

    def candidates(self, lowered: str) -> Sequence[KnownError]:
        """Return the entries of which a text is in a line, in their order.

        Lines that differ in their numbers only are asked for once: a text without digits is in a
        line also after its digits are taken out.
        """
        entries = self._worded(lowered.translate(_NO_DIGITS))
        numbered = [text for text in self._with_digits if text in lowered]
        if not numbered:
            return entries
        return self._in_order({*entries, *(e for text in numbered for e in self._by_literal[text])})

    def recognise(self, text: str) -> KnownError | None:
        """Return the entry for a line on its own; those that need other lines are left out."""
        lowered = text.lower()
        found = [
            entry
            for entry in self.candidates(lowered)
            if entry.role != "note" and not entry.is_conditional and entry.match(text, lowered)
        ]
        return min(found, key=order) if found else None

    def _in_order(self, entries: Iterable[KnownError]) -> tuple[KnownError, ...]:
        return tuple(sorted(entries, key=lambda entry: self._places[entry.id]))

    @functools.cached_property
    def _worded(self) -> Callable[[str], tuple[KnownError, ...]]:
        worded = [(text, some) for text, some in self._by_literal.items() if not _DIGIT(text)]

        @functools.lru_cache(_MAX_CACHED)
        def find(text: str) -> tuple[KnownError, ...]:
            return self._in_order({e for literal, some in worded if literal in text for e in some})

        return find

    @functools.cached_property
    def _with_digits(self) -> tuple[str, ...]:
        return tuple(text for text in self._by_literal if _DIGIT(text))

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {entry.id: place for place, entry in enumerate(self.entries)}


_ROLE_ORDER = {"benign": 0, "initiating": 1, "cascade": 2, "teardown": 3, "note": 4}


def order(entry: KnownError) -> tuple[int, int]:
    """Return the place of an entry among those that recognise the same line.

    A harmless line stays harmless whatever else it seems to say, and the one that says most wins.
    """
    return _ROLE_ORDER[entry.role], -entry.strength


@functools.cache
def known_errors() -> KnownErrors:
    """Return our own entries."""
    return read_entries(())


def read_entries(own: Sequence[Path]) -> KnownErrors:
    """Return our entries with a user's files in front. Raises `EntryFileError`.

    An entry of a later file replaces one of the same id.
    """
    entries: dict[str, KnownError] = {}
    for path in [*own, *sorted(_OURS.glob("*.toml"))]:
        for entry in _entries(path):
            known = entries.setdefault(entry.id, entry)
            if known is not entry and known.file == entry.file:
                raise EntryFileError(f"{path}: two entries have the id {entry.id!r}")
    _check_names(entries.values())
    return KnownErrors(tuple(entries.values()))


def _entries(path: Path) -> Iterable[KnownError]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EntryFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EntryFileError(f"{path}: is no TOML file: {error}") from error
    unknown = sorted(set(tables) - {"entry"})
    if unknown:
        raise EntryFileError(
            f"{path}: field {unknown[0]!r} is not known; write [[entry]] for each entry"
        )
    rows = tables.get("entry", [])
    if not isinstance(rows, list) or not rows:
        raise EntryFileError(f"{path}: has no entries; write [[entry]] for each entry")
    try:
        return [entry_of(row, str(path)) for row in rows]
    except EntryError as error:
        raise EntryFileError(str(error)) from error


def _check_names(entries: Iterable[KnownError]) -> None:
    known = {entry.id for entry in entries}
    for entry in entries:
        for key, names in (("when", entry.when), ("unless", entry.unless)):
            for name in names:
                if name not in known:
                    raise EntryFileError(
                        f"{entry.file}: entry {entry.id!r}: field {key!r} names {name!r}, "
                        "which is no entry"
                    )
