"""Commands that are safe to paste: text from a report is one quoted word."""

from __future__ import annotations

import shlex

from rankscope.preflight.model import acts


def word(text: object) -> str:
    """Return `text` as one word of a shell, whatever it holds, on one line."""
    raw = str(text)
    if not any(map(acts, raw)):
        return shlex.quote(raw)
    return f"$'{''.join(map(_escaped, raw))}'"


def quoted(text: object) -> str:
    """Return `text` as one word, in quotes also where it needs none."""
    safe = word(text)
    return safe if safe.startswith(("'", "$'")) else f"'{safe}'"


def command(*words: object) -> str:
    """Return a command of these words: none of them can be more than a word."""
    return " ".join(map(word, words))


def _escaped(one: str) -> str:
    if one in "\\'":
        return f"\\{one}"
    return f"\\U{ord(one):08x}" if acts(one) else one
