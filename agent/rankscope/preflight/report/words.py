"""Words that all reports share, and texts from other machines made safe to print."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.cells import cell_len, set_cell_size

from rankscope.preflight.model import acts


def clean(text: str) -> str:
    """Return `text` on one line, with every character that a terminal would act on written out."""
    return _spelled(" ".join(text.split()))


def clean_command(text: str) -> list[str]:
    """Return the lines of a command, safe to print and otherwise as they are."""
    return [_spelled(line.expandtabs(4)) for line in text.strip("\n").splitlines()] or [""]


def _spelled(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one if not acts(one) else one.encode("unicode_escape", "backslashreplace").decode("ascii")
        for one in text
    )


def cut(text: str, columns: int) -> str:
    """Return `text` in at most `columns` cells of a terminal; "..." for the rest."""
    if cell_len(text) <= columns:
        return text
    return set_cell_size(text, max(0, columns - 3)).rstrip() + "..."


def wrapped(text: str, columns: int) -> list[str]:
    """Return `text` in lines of at most `columns` cells, broken at spaces where there are any."""
    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= columns:
            line = longer
            continue
        if line:
            lines.append(line)
        while cell_len(word) > columns:
            head = set_cell_size(word, columns).rstrip()
            lines.append(head)
            word = word[len(head) :]
        line = word
    return [*lines, line] if line or not lines else lines


def count(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds_text(milliseconds: float) -> str:
    """Return a duration as people say it: "0.4 s", "12 s", "1 min 5 s"."""
    seconds = milliseconds / 1e3
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def joined(parts: Iterable[str], last: str = " and ") -> str:
    """Return "a", "a and b", "a, b and c"."""
    words = list(parts)
    return last.join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def most_common_first(words: Iterable[str]) -> list[tuple[str, int]]:
    """Return the words with their counts; equal counts in alphabetical order."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def is_safe_name(name: str, also: Collection[str] = ".-_:") -> bool:
    """Return whether `name` can stand in a list of hosts without meaning something else."""
    return bool(name) and all(one.isascii() and (one.isalnum() or one in also) for one in name)
