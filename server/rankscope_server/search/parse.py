"""Reads the text of the search box into a tree; what it cannot read is an error at its place.

query   := both (OR both)*
both    := one ([AND] one)*
one     := (- | NOT) one | ( query ) | /regex/[i] | filter | text
filter  := name : value (, value)*
text    := [*] (word | "phrase") [*]
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankscope_server.search import filters
from rankscope_server.search.scan import compiled
from rankscope_server.search.tree import (
    EVERYTHING,
    And,
    Node,
    Not,
    Or,
    Place,
    QueryError,
    Regex,
    Text,
)

MAX_CHARS = 2_000
MAX_DEPTH = 20
MAX_LEAVES = 64
_SPACE = re.compile(r"\s*")
_FILTER = re.compile(r"([A-Za-z_]+):")
_WORD = re.compile(r'[^\s()"]+')
_OPERATORS = {"OR", "AND", "NOT"}


def parse(query: str, now_ns: int) -> Node:
    """Return the tree of a query; `since:-10m` counts from `now_ns`. Raises QueryError."""
    if len(query) > MAX_CHARS:
        raise QueryError(
            f"a query of {len(query):,} characters", Place(MAX_CHARS, len(query)),
            f"use at most {MAX_CHARS:,}",
        )  # fmt: skip
    return _Reader(query, now_ns).read()


@dataclass(slots=True)
class _Reader:
    text: str
    now_ns: int
    at: int = 0
    depth: int = 0
    num_leaves: int = 0

    def read(self) -> Node:
        self._skip()
        if self.at == len(self.text):
            return EVERYTHING
        node = self._either()
        if self.at < len(self.text):
            raise self._error("a ) without its (", 1, "remove it, or put it in quotation marks")
        return node

    def _either(self) -> Node:
        nodes = [self._both()]
        while self._operator() == "OR":
            self._take("OR")
            nodes.append(self._both())
        return nodes[0] if len(nodes) == 1 else Or(tuple(nodes))

    def _both(self) -> Node:
        nodes = [self._one()]
        while self.at < len(self.text) and self.text[self.at] != ")":
            operator = self._operator()
            if operator == "OR":
                break
            if operator == "AND":
                self._take("AND")
            nodes.append(self._one())
        return nodes[0] if len(nodes) == 1 else And(tuple(nodes))

    def _one(self) -> Node:
        start = self.at
        operator = self._operator()
        if operator in ("OR", "AND"):
            raise self._error(
                f"{operator} stands between two searches; here is none before it", len(operator),
                f'write something before it, or "{operator}" to search for the word',
            )  # fmt: skip
        if start == len(self.text) or self.text[start] == ")":
            raise self._error(
                "here something to search for is missing", 1,
                "write a word; text that holds ( or ) stands in quotation marks",
            )  # fmt: skip
        if operator == "NOT":
            self._take("NOT")
            return self._negated(start)
        if self.text[start] == "-" and self.text[start + 1 : start + 2].strip():
            self.at += 1
            return self._negated(start)
        if self.text[start] == "(":
            return self._group(start)
        return self._leaf(start)

    def _negated(self, start: int) -> Node:
        self._deeper(start)
        node = Not(self._one())
        self.depth -= 1
        return node

    def _group(self, start: int) -> Node:
        self._deeper(start)
        self.at += 1
        self._skip()
        node = self._either()
        if self.text[self.at : self.at + 1] != ")":
            self.at = start
            raise self._error("a ( without its )", 1, "write ) behind what belongs together")
        self.at += 1
        self._skip()
        self.depth -= 1
        return node

    def _leaf(self, start: int) -> Node:
        self.num_leaves += 1
        if self.num_leaves > MAX_LEAVES:
            raise self._error("a query of too many parts", 1, f"use at most {MAX_LEAVES}")
        if self.text[start] == "/" and (regex := self._regex(start)) is not None:
            return regex
        found = _FILTER.match(self.text, start)
        # A colon that ends a word is a part of it, as in `RuntimeError: `.
        is_text = found is None or self.text[found.end() : found.end() + 1] in ("", ")", *" \t\n")
        if found is not None and (found[1].lower() in filters.HELP or not is_text):
            self.at = found.end()
            values = self._values(found.end())
            node = filters.read(found[1], values, Place(start, self.at), self.now_ns)
        else:
            node = self._text(start)
        self._skip()
        return node

    def _regex(self, start: int) -> Node | None:
        """Return the regular expression that begins here; None where it is a path, as /data/x."""
        end = _regex_end(self.text, start + 1)
        if end is None:
            if _looks_like_path(self.text, start):
                return None
            raise self._error(
                "a regular expression without its closing /", 1,
                'write / behind it, or put it in quotation marks to search for the text',
            )  # fmt: skip
        flags = _WORD.match(self.text, end + 1)
        if flags is not None and flags[0] != "i":
            if _looks_like_path(self.text, start):
                return None
            self.at = end + 1
            raise self._error(
                f"{flags[0][:20]!r} behind a regular expression", len(flags[0]),
                "only i stands there, which is for any case; write a space before other words",
            )  # fmt: skip
        self.at = end + 1 + (flags is not None)
        pattern = self.text[start + 1 : end].replace("\\/", "/")
        node = Regex(pattern, flags is not None, Place(start, self.at))
        if not pattern:
            self.at = start
            raise self._error("an empty regular expression", 2, "write it between the two /")
        compiled(node)
        self._skip()
        return node

    def _values(self, start: int) -> list[tuple[str, Place]]:
        """Return the values of a filter, which commas separate, each with its place."""
        values: list[tuple[str, Place]] = []
        while True:
            at = self.at
            value = self._quoted() if self.text[at : at + 1] == '"' else self._plain_value()
            if not value:
                raise QueryError(
                    "a filter without a value", Place(start, max(at, start + 1)),
                    "write the value right behind the colon or comma",
                )  # fmt: skip
            values.append((value, Place(at, self.at)))
            if self.text[self.at : self.at + 1] != ",":
                return values
            self.at += 1

    def _plain_value(self) -> str:
        found = re.compile(r'[^\s()",]*').match(self.text, self.at)
        value = found[0] if found else ""
        self.at += len(value)
        return value

    def _text(self, start: int) -> Node:
        is_open_left = self.text[start] == "*"
        self.at = start + is_open_left
        if self.text[self.at : self.at + 1] == '"':
            text = self._quoted()
            is_open_right = self.text[self.at : self.at + 1] == "*"
            self.at += is_open_right
        else:
            found = _WORD.match(self.text, self.at)
            word = found[0] if found else ""
            self.at += len(word)
            is_open_right = word.endswith("*")
            text = word.removesuffix("*")
        place = Place(start, self.at)
        if not text.strip("*"):
            raise QueryError("here is nothing to search for", place, "write a word beside the *")
        if "*" in text and self.text[start + is_open_left] != '"':
            star = self.text.index("*", start + 1)
            raise QueryError(
                "a * within a word", Place(star, star + 1),
                "it stands before or behind a word; use /a.*b/, or quotation marks for the sign",
            )  # fmt: skip
        return Text(text, is_open_left, is_open_right, place)

    def _quoted(self) -> str:
        start = self.at
        text: list[str] = []
        at = start + 1
        while at < len(self.text) and self.text[at] != '"':
            if self.text[at] == "\\" and self.text[at + 1 : at + 2] in ('"', "\\"):
                at += 1
            text.append(self.text[at])
            at += 1
        if at >= len(self.text):
            raise self._error(
                "a quotation mark without its second one", 1,
                r'write " behind the phrase, or \" in it for the sign itself',
            )  # fmt: skip
        self.at = at + 1
        if not text:
            self.at = start
            raise self._error("an empty phrase", 2, "write what to search for between the marks")
        return "".join(text)

    def _operator(self) -> str | None:
        found = _WORD.match(self.text, self.at)
        return found[0] if found is not None and found[0] in _OPERATORS else None

    def _take(self, operator: str) -> None:
        self.at += len(operator)
        self._skip()

    def _skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _deeper(self, start: int) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.at = start
            raise self._error("too many levels", 1, f"use at most {MAX_DEPTH} of ( and -")

    def _error(self, what: str, length: int, remedy: str) -> QueryError:
        end = min(self.at + length, max(len(self.text), self.at + 1))
        return QueryError(what, Place(self.at, end), remedy)


def _regex_end(text: str, at: int) -> int | None:
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "/":
            return at
        at += 1
    return None


def _looks_like_path(text: str, start: int) -> bool:
    """Return whether the word that begins with / is a path: plain characters alone."""
    found = _WORD.match(text, start)
    return found is not None and re.fullmatch(r"/[\w./:=@%+,-]+", found[0]) is not None
