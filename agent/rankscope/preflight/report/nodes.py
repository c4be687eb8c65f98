"""Lists of nodes as Slurm writes them, and the nodes that a job had better do without.

The form is that of `scontrol show hostlist` (Slurm's man page of scontrol): a prefix, then numbers
and ranges in brackets. Widths are kept: node[08-10] means node08, node09, node10. `hostlist`
reads it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankscope.preflight.model import LaunchVerdict
from rankscope.preflight.report.words import is_safe_name

_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.DOTALL)  # longer ones are hashes, no numbers


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
    wanted: dict[str, int] = {}  # the text that continues with a range: its place
    for one in sorted(digits, key=lambda text: (int(text), len(text))):
        place = wanted.pop(one, len(ranges))
        first = ranges[place][0] if place < len(ranges) else one
        ranges[place:] = [(first, one), *ranges[place + 1 :]]
        wanted[str(int(one) + 1).zfill(len(first))] = place
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return prefix + ranges[0][0]
    inner = ",".join(low if low == high else f"{low}-{high}" for low, high in ranges)
    return f"{prefix}[{inner}]"


def bad_nodes(verdict: LaunchVerdict, with_warnings: bool = False) -> tuple[str, ...]:
    """Return the nodes to leave out of the next try, in the order of `verdict.expected`.

    Only a finding that is about single nodes names any. What the launch itself gets wrong
    (family `launch`) and what is the same on all nodes would meet the next nodes as well; a pair
    whose bad end is not known names none: better silent than wrong.
    """
    statuses = {"fail", "warn"} if with_warnings else {"fail"}
    families = {result.id: result.family for result in verdict.results}
    all_nodes = set(verdict.expected) | set(verdict.reported)
    named: set[str] = set()
    for finding in verdict.findings:
        culprits = set(finding.nodes)
        is_about_the_launch = families.get(finding.id) == "launch" and finding.id != "node.absent"
        if finding.status in statuses and not is_about_the_launch and culprits < all_nodes:
            named |= culprits
    ordered = [name for name in verdict.expected if name in named]
    return tuple(n for n in [*ordered, *sorted(named - set(ordered))] if is_safe_name(n))
