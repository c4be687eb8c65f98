"""What differs between the facts, the nodes and the command lines of two runs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankscope_server.findings.finding import Severity
from rankscope_server.observe.environment_rules import (
    is_near,
    is_unknown,
    is_variable,
    kind_of,
    level_of,
    normal,
)

NOT_SET = "not set"
NODE, OPTION = "node", "option"
_ORDER = {"critical": 0, "warning": 1, "info": 2}
_CODE = re.compile(r"^(code|git)[._]")
# Another one in each run by nature; what a command says is compared option by option.
_OF_A_RUN = re.compile(
    r"^command\.hash$|^env\.(TORCHELASTIC_\w+|SLURM_JOB\w*|SLURM_NODELIST|SLURM_SUBMIT_\w+"
    r"|PBS_JOBID|LSB_JOBID|JOBSET_\w+|VC_JOB_RETRY_COUNT|SKYPILOT_TASK_ID|RANKSCOPE_\w+)$"
)
_OPTION = re.compile(r"^--?[A-Za-z][\w.-]*$")


@dataclass(frozen=True, slots=True)
class Drift:
    """One fact that differs; the values of each side, none where it has no such thing."""

    fact: str
    kind: str  # of environment_rules, or "node", "option", "code"
    severity: Severity
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drifts:
    """All that differs, what may matter most first, and of how many facts it is not known."""

    rows: tuple[Drift, ...] = ()
    unknown: tuple[str, ...] = ()  # facts that one side alone has said
    common: int = 0


Facts = Mapping[str, frozenset[str]]  # by name; the values that ranks of one side have


def facts_drift(before: Facts, after: Facts) -> Drifts:
    """Return which facts differ. What one side does not say is no difference.

    A variable of the environment that is not set says something, where others are known.
    """
    rows, unknown, common = [], [], 0
    for fact in sorted({*before, *after}):
        if level_of(fact) == "own" or _OF_A_RUN.search(fact):
            continue
        sides = [_values(fact, facts) for facts in (before, after)]
        if not all(sides):
            unknown.append(fact)
        elif _is_same(fact, *sides):
            common += 1
        else:
            rows.append(_drift(fact, *sides))
    rows.sort(key=lambda row: (_ORDER[row.severity], row.kind != "version", row.fact))
    return Drifts(tuple(rows), tuple(unknown), common)


def by_weight(*drifts: Drift) -> tuple[Drift, ...]:
    """Return what may matter most first; what weighs the same stays in its order."""
    return tuple(sorted(drifts, key=lambda one: _ORDER[one.severity]))


def _values(fact: str, facts: Facts) -> frozenset[str]:
    sent = facts.get(fact, frozenset())
    if not is_variable(fact):
        return frozenset(normal(fact, one) for one in sent if not is_unknown(fact, one))
    values = frozenset(normal(fact, one) for one in sent if one)
    if not facts:
        return values
    is_unset = "" in facts.get(fact, ("",))
    return values | {NOT_SET} if is_unset else values


def _is_same(fact: str, before: frozenset[str], after: frozenset[str]) -> bool:
    if before == after:
        return True
    return all(any(is_near(fact, one, two) for two in after) for one in before) and all(
        any(is_near(fact, one, two) for two in before) for one in after
    )


def _drift(fact: str, before: frozenset[str], after: frozenset[str]) -> Drift:
    level = level_of(fact, tuple(sorted(before | after)))
    severity: Severity = "info" if level == "own" else level
    kind = "code" if _CODE.search(fact) else kind_of(fact)
    return Drift(fact, kind, severity, tuple(sorted(before)), tuple(sorted(after)))


def nodes_drift(before: Iterable[str], after: Iterable[str]) -> tuple[Drift, ...]:
    """Return which nodes are of one side only; none where the nodes of a side are not known."""
    old, new = set(before), set(after)
    if not old or not new or old == new:
        return ()
    gone = [Drift(host, NODE, "info", (host,), ()) for host in sorted(old - new)]
    return tuple([Drift(host, NODE, "info", (), (host,)) for host in sorted(new - old)] + gone)


def command_drift(before: Sequence[str], after: Sequence[str]) -> tuple[Drift, ...]:
    """Return which options and words of two command lines differ; none where one is not known."""
    if not before or not after:
        return ()
    old, new = options_of(before), options_of(after)
    return tuple(
        Drift(
            name, OPTION, "info", (old[name],) if name in old else (),
            (new[name],) if name in new else (),
        )
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    )  # fmt: skip


def options_of(command: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line with their values; other words are "argument 1", ...

    An option takes the word after it, unless that is an option: which ones take none is not known.
    """
    found: dict[str, str] = {}
    num_words = 0
    words = list(command)
    while words:
        word = words.pop(0)
        name, sign, value = word.partition("=")
        if sign and _OPTION.match(name):
            found[name] = value
        elif _OPTION.match(word):
            takes_next = bool(words) and not _OPTION.match(words[0].partition("=")[0])
            found[word] = words.pop(0) if takes_next else "set"
        else:
            num_words += 1
            found[f"argument {num_words}"] = word
    return found
