"""Words that this project does not use, and the field's word for each (docs/glossary.md).

python -m tests.words            each place where one of them is used
python -m tests.words --count    how often, by file
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Written here once, used nowhere in the field. The right side is shown to the author.
WORDS = {
    r"told|untold": "reported, shown",
    r"tells|tell": "reports, shows; of two things: distinguish",
    r"nobody|somebody|whoever": "no rank, a healthy rank, the user, ...",
    r"held against|holds? against": "compared with",
    r"own[ _]work": "self time",
    r"kinship": "inherited process",
    r"asides": "notes",
    r"wrong if": "what would disprove it",
    r"spells?": "episodes",
    r"folding": "grouping",
    r"story|stories": "incident",
    r"judges?|judged|judging|judgements?": "validate (a batch), evaluate (facts)",
    r"the book": "the known errors",
    r"times as (?:slow|long) as|times as fast": "slower, faster, with a figure",
    r"error book": "known errors",
    r"stands? apart": "is an outlier",
    r"says? nothing any more": "has stopped reporting",
    r"how-many-th": "position",
}
ALLOWED = re.compile(
    r"own_work(?:_ms)?\b|would_be_wrong_if|\bfolded\b|stands_apart"
)  # keys of the API
KEYS = frozenset({"told", "untold", "asides", "wrong if", "wrong_if"})  # of stored preflights
ALLOWED_IN = {  # where such a word is a name that others rely on
    "agent/rankscope/preflight/model.py": KEYS,
    "agent/rankscope/preflight/checks/interfaces.py": KEYS,
    "agent/rankscope/preflight/facts/script.py": KEYS,
    "agent/rankscope/preflight/facts/software.py": KEYS,
    "agent/rankscope/preflight/facts/storage.py": KEYS,
    "server/rankscope_server/api/preflight/schema.py": KEYS,
    "web/app/parts/preflight.js": KEYS,
    "docs/api.md": KEYS,
    # Ready-made binaries are of these sources to the byte: changed when they are built again.
    "agent/rankscope/native/probe/probe.cpp": frozenset({"tell", "told", "tells", "nobody"}),
    "agent/rankscope/rank/hooks/phases/checkpoint.py": frozenset({"tell"}),  # of a file
    "server/rankscope_server/importers/nccl_log.py": frozenset({"tell"}),
}
_SCANNED = ("agent", "server", "reference_trainer", "web", "docs")
_SUFFIXES = ("py", "js", "md", "toml", "cpp", "hpp", "css", "html", "sh")
_LEFT_OUT = {"ready", "vendor", "node_modules"}  # binaries, and what others wrote
_PATTERN = re.compile("|".join(rf"(?P<w{i}>\b(?:{word})\b)" for i, word in enumerate(WORDS)), re.I)


@dataclass(frozen=True)
class Use:
    """One place where such a word is used."""

    path: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.instead}"


def files() -> list[Path]:
    """Return what is checked: the product, its page, its documents."""
    found = sorted(ROOT.glob("*.md"))
    for folder in _SCANNED:
        for suffix in _SUFFIXES:
            found += sorted((ROOT / folder).rglob(f"*.{suffix}"))
    return [path for path in found if _LEFT_OUT.isdisjoint(path.parts)]


def uses(path: Path) -> Iterator[Use]:
    """Yield every use in one file: names by their parts, comments, strings and prose."""
    return uses_in(str(path.relative_to(ROOT)), lines(path))


def uses_in(name: str, text: Iterable[tuple[int, str]]) -> Iterator[Use]:
    """Yield every use in numbered lines of the file of this name."""
    for number, line in text:
        for match in _PATTERN.finditer(ALLOWED.sub("", line)):
            if match.group().lower() in ALLOWED_IN.get(name, ()):
                continue
            instead = list(WORDS.values())[int((match.lastgroup or "w0")[1:])]
            yield Use(name, number, match.group(), instead)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file; of Python's names the parts as words."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], ALLOWED.sub("", token.string).replace("_", " ")
        elif token.type in (tokenize.STRING, tokenize.COMMENT, _MIDDLE):
            yield from enumerate(token.string.splitlines(), token.start[0])


_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # Python 3.12 and newer


def main() -> int:
    """Print what was asked for; return 1 where there is anything."""
    found = [use for path in files() for use in uses(path)]
    if "--count" in sys.argv:
        by_file = Counter(use.path for use in found)
        sys.stdout.writelines(f"{count:5}  {path}\n" for path, count in by_file.most_common())
    else:
        sys.stdout.writelines(f"{use}\n" for use in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
