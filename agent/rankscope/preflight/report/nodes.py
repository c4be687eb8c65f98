"""Lists of nodes as Slurm writes them, and the nodes that a job had better do without.

The form is that of `scontrol show hostlist` (Slurm's man page of scontrol): a prefix, then numbers
and ranges in brackets. Widths are kept, so that node[08-10] means node08, node09, node10.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankscope.preflight.model import Verdict
from rankscope.preflight.report.words import is_safe_name

_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.DOTALL)  # longer ones are hashes, no numbers
_GROUP = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST = 1 << 16  # names out of one range: as many as Slurm itself allows (hostlist.c, MAX_RANGE)


def compress(names: Iterable[str]) -> str:
    """Return `names` as one list, "node[1-3,7],gpu-[001-004]"; an empty text for none."""
    plain: list[str] = []
    numbers: dict[str, set[str]] = {}
    for name in dict.fromkeys(names):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            plain.append(name)
        else:
            numbers.setdefault(found[1], set()).add(found[2])
    groups = [_group(prefix, digits) for prefix, digits in numbers.items()]
    return ",".join(sorted(plain + groups))


def _group(prefix: str, digits: set[str]) -> str:
    ranges: list[tuple[str, str]] = []
    for one in sorted(digits, key=lambda text: (int(text), len(text))):
        if ranges:
            first, last = ranges[-1]
            if str(int(last) + 1).zfill(len(first)) == one:
                ranges[-1] = (first, one)
                continue
        ranges.append((one, one))
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return prefix + ranges[0][0]
    inner = ",".join(low if low == high else f"{low}-{high}" for low, high in ranges)
    return f"{prefix}[{inner}]"


def expand(text: str) -> list[str]:
    """Return the names of a list. Raises ValueError, which shows the part that is none."""
    names: list[str] = []
    rest = text.strip()
    while rest:
        found = _GROUP.match(rest)
        if found is None:
            raise ValueError(f"{rest!r} is no list of nodes; write node[1-3,7] or node1,node2")
        names += [found[3].strip()] if found[3] is not None else _names(found[1].strip(), found[2])
        rest = rest[found.end() :]
        if rest and not rest.startswith(","):
            raise ValueError(f"{text!r}: nothing may follow a bracket but a comma")
        rest = rest[1:].lstrip()
    return [name for name in dict.fromkeys(names) if name]


def _names(prefix: str, inner: str) -> list[str]:
    names: list[str] = []
    for part in inner.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} in brackets is no number and no range; write [1-3,7]")
        low, high, width = int(found[1]), int(found[2] or found[1]), len(found[1])
        if high < low or high - low >= _MOST:
            raise ValueError(f"{part!r} runs backwards or names more than {_MOST:,} nodes")
        names += [f"{prefix}{number:0{width}d}" for number in range(low, high + 1)]
    return names


def bad_nodes(verdict: Verdict, with_warnings: bool = False) -> tuple[str, ...]:
    """Return the nodes to leave out of the next try, in the order of `verdict.expected`.

    Only a finding that is about single nodes names any. What the launch itself gets wrong
    (family `launch`) and what is the same on all nodes would meet the next nodes as well; a pair
    of which nobody knows the bad end names none: better silent than wrong.
    """
    statuses = {"fail", "warn"} if with_warnings else {"fail"}
    families = {result.id: result.family for result in verdict.results}
    everybody = set(verdict.expected) | set(verdict.reported)
    named: set[str] = set()
    for finding in verdict.findings:
        culprits = set(finding.nodes)
        is_about_the_launch = families.get(finding.id) == "launch" and finding.id != "node.absent"
        if finding.status in statuses and not is_about_the_launch and culprits < everybody:
            named |= culprits
    ordered = [name for name in verdict.expected if name in named]
    return tuple(n for n in [*ordered, *sorted(named - set(ordered))] if is_safe_name(n))
