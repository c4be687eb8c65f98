"""env.unknown: a variable that nobody reads is likely misspelt."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
_LIST = Path(__file__).with_name("known_variables.txt")
# SequenceMatcher ratio: one letter of 18 is 0.97, IFACE for IFNAME 0.89, other variables below
_CLOSE = 0.88


class EnvUnknown:
    """Every NCCL_, TORCH_ and GLOO_ variable is one that is read, not one letter off."""

    id: ClassVar[str] = "env.unknown"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn on names that are close to a known one and are none."""
        nodes_of: dict[str, list[str]] = {}
        for node, launch in run.launches.items():
            for name in launch.environment:
                if name.startswith(_PREFIXES):
                    nodes_of.setdefault(name, []).append(node)
        for name, nodes in sorted(nodes_of.items()):
            meant = closest(name)
            if not meant:
                continue
            value = run.launches[nodes[0]].environment[name]
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {name} is read by nobody; did you mean {meant}?",
                evidence={"name": name, "meant": meant, "value": value},
                fix=(Fix(command=f"unset {name}; export {meant}='{value}'"),),
                would=f"{name} is ignored without a word",
                wrong_if="a plugin of your site, or a newer NCCL or torch, reads it",
                confidence="likely",
            )


def closest(name: str) -> str:
    """Return the known name that `name` nearly is; "" if it is known, or near to none."""
    known = known_variables()
    if name in known:
        return ""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_CLOSE)
    return found[0] if found else ""


@functools.cache
def known_variables() -> frozenset[str]:
    """Return all names of the list beside this file."""
    lines = (line.partition("#")[0].strip() for line in _LIST.read_text().splitlines())
    return frozenset(line for line in lines if line)
