"""What an assistant gets: text in which nothing acts, in so many bytes, and what was left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from rankscope.terminal import shown

MOST_BYTES = 24 << 10  # of one answer: about 8,000 tokens
_MOST_CHARACTERS = 4_000  # of one text
_LEAST_CUT = 200
_MOST_NAMED = 20
# ECMA-48: a control sequence, a string with its end, any other sequence that ESC begins
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\`-~]"
)
# what a person does not see and a program reads: zero width, tags, selectors of variants
_HIDDEN = re.compile(
    "[\u00ad\u180e\u200b-\u200d\u2060-\u2064\ufeff\ufe00-\ufe0e\U000e0000-\U000e01ef]"
)


def clean(text: str) -> str:
    """Return a text without escape sequences; signs that are not seen are shown as numbers."""
    if text.isascii() and text.isprintable():
        return text
    plain = shown(_SEQUENCE.sub("", text))
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", plain)


def fitted(answer: dict[str, Any], most_bytes: int = MOST_BYTES) -> str:
    """Return an answer as JSON of at most so many bytes in UTF-8, in which no text acts.

    Of lists the first entries stay; `left_out` says how many others there are.
    """
    tree = {"answer": _cleaned(answer)}
    left: dict[str, int] = {}
    while True:
        fields = tree["answer"] | ({"left_out": _sentences(left)} if left else {})
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        if _num_bytes(text) <= most_bytes:
            return text
        if not _cut_the_largest(tree, left):
            return json.dumps({"left_out": [f"all: it has more than {most_bytes:,} bytes"]})


def _sentences(left: dict[str, int]) -> list[str]:
    named = [f"{path}: {count:,} more" for path, count in list(left.items())[:_MOST_NAMED]]
    others = len(left) - len(named)
    return [*named, *([f"{others:,} more places"] if others else [])]


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _shortened(clean(value), _MOST_CHARACTERS)
    if isinstance(value, dict):
        return {_shortened(clean(str(key)), 100): _cleaned(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(one) for one in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):  # NaN and infinity are none of JSON's numbers
        return value if math.isfinite(value) else None
    return _cleaned(str(value))  # a date, a decimal number of SQL


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _cut_the_largest(tree: dict[str, Any], left: dict[str, int]) -> bool:
    """Halve the largest list, else text, else object. Returns whether there was one."""
    kinds: tuple[Callable[[Any], bool], ...] = (
        lambda value: isinstance(value, list) and len(value) > 1,
        lambda value: isinstance(value, str) and len(value) > _LEAST_CUT,
        lambda value: isinstance(value, (list, dict)) and len(value) > 0,
    )
    places = list(_places(tree["answer"], tree, "answer", ""))
    for is_of_kind in kinds:
        of_kind = [place for place in places if is_of_kind(place[0][place[1]])]
        if of_kind:
            parent, key, path, _ = max(of_kind, key=lambda place: place[3])
            value = parent[key]
            parent[key], count = _half(value)
            if not isinstance(value, str):
                left[path or "all"] = left.get(path or "all", 0) + count
            return True
    return False


def _half(value: Any) -> tuple[Any, int]:
    """Return the first half of a value, and how many entries are not in it."""
    if isinstance(value, str):
        return _shortened(value, max(len(value) // 2 - 40, _LEAST_CUT // 2)), 0
    kept = len(value) // 2
    if isinstance(value, list):
        return value[:kept], len(value) - kept
    return dict(list(value.items())[:kept]), len(value) - kept


def _places(value: Any, parent: Any, key: Any, path: str) -> Iterator[tuple[Any, Any, str, int]]:
    """Yield each value below one and itself last: where it is, its path, about how many bytes."""
    size = len(value) if isinstance(value, str) else 8
    if isinstance(value, (dict, list)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in entries:
            below = path if isinstance(value, list) else f"{path}.{name}".lstrip(".")
            for place in _places(one, value, name, below):
                yield place
            size += place[3] + len(str(name))
    yield parent, key, path, size
