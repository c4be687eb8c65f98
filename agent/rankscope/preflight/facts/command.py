"""Reads a launch command as torchrun will: which options it was given.

The names of the options are those of torch 2.13 (torch/distributed/run.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

_VALUES = (
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf",
    "max-restarts", "monitor-interval", "start-method", "event-log-handler", "role", "log-dir",
    "redirects", "tee", "local-ranks-filter", "duplicate-stdout-filters",
    "duplicate-stderr-filters", "node-rank", "master-addr", "master-port", "local-addr",
    "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
    "log-line-prefix-template", "print-completion",
)  # fmt: skip
_SWITCHES = ("standalone", "module", "no-python", "run-path", "virtual-local-rank", "use-env")
_SHORT = {"-r": "redirects", "-t": "tee", "-m": "module"}


@dataclass(frozen=True)
class Torchrun:
    """What a torchrun command says: its options without dashes, and the program it starts."""

    options: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()  # options whose value a shell has yet to work out


def find_torchrun(argv: Sequence[str], environ: Mapping[str, str]) -> Torchrun | None:
    """Return the torchrun command within `argv`, behind srun, mpirun, env or a shell; else None.

    A $NAME that a shell would replace is taken from `environ`.
    """
    for index, word in enumerate(argv):
        name = PurePath(word).name
        if name in ("torchrun", "torchrun.exe") or word.endswith("torch/distributed/run.py"):
            return _options(argv[index + 1 :], environ)
        if word == "-m" and argv[index + 1 : index + 2] in (
            ["torch.distributed.run"], ["torch.distributed.launch"],
        ):  # fmt: skip
            return _options(argv[index + 2 :], environ)
        if re.search(r"\btorchrun\s|torch\.distributed\.(run|launch)\s", word):
            return _within(word, environ)
    return None


def _within(text: str, environ: Mapping[str, str]) -> Torchrun | None:
    """Read a command that a shell is given as one word."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:  # quotes that do not close
        return None
    return find_torchrun(words, environ) if len(words) > 1 else None


def _options(argv: Sequence[str], environ: Mapping[str, str]) -> Torchrun:
    options: dict[str, str] = {}
    unread: set[str] = set()
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        known = _SHORT.get(name) or _full_name(name)
        if known is None:
            continue  # of another version of torch; torchrun itself will say
        if known in _SWITCHES:
            options[known] = "1"
        else:
            value = value if sign else (rest.pop(0) if rest else "")
            while rest and (value.count("$(") > value.count(")") or value.count("`") % 2):
                value += " " + rest.pop(0)  # a command within the command
            options[known] = _expanded(value, environ)
            if re.search(r"[$`]", options[known]):
                unread.add(known)
    program = rest[1:] if rest[:1] == ["--"] else rest
    return Torchrun(options, tuple(program), frozenset(unread))


def _expanded(value: str, environ: Mapping[str, str]) -> str:
    """Replace $NAME and ${NAME} where the environment has it."""
    return re.sub(
        r"\$(?:(\w+)|\{(\w+)\})", lambda hit: environ.get(hit[1] or hit[2], hit[0]), value
    )


def _full_name(word: str) -> str | None:
    """Return the option that `word` names or, as argparse has it, begins without doubt."""
    if not word.startswith("--"):
        return None
    asked = word[2:].replace("_", "-")
    known = (*_VALUES, *_SWITCHES)
    hits = [name for name in known if name == asked] or [n for n in known if n.startswith(asked)]
    return hits[0] if len(hits) == 1 else None
