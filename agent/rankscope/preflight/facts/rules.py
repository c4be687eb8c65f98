"""What the rules of this node's packet filter can do, where this user may read them (root).

Which rule it is that drops a packet is not worked out: only whether any could, and which way. Where
none could, what is lost on the way is lost somewhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from rankscope.preflight.system import System

LIMIT_S = 2.0  # ten thousand rules take 0.2 s
_LEGACY = (
    "/proc/net/ip_tables_names",
    "/proc/net/ip6_tables_names",
)  # tables that nft does not see
_HOOKS_IN = frozenset(("ingress", "prerouting", "input"))
_HOOKS_OUT = frozenset(("output", "postrouting", "egress"))
_DROPS = re.compile(r"\b(drop|reject|queue|synproxy|DROP|REJECT|NFQUEUE)\b")
_REDIRECTS = re.compile(r"\b(redirect|dnat|tproxy|REDIRECT|DNAT|TPROXY)\b")
_TO = re.compile(r"(?:\b(?:jump|goto)\s+|@)([\w./-]+)")
_HOOK = re.compile(r"\btype \w+ hook (\w+)")


class FilterRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a rule could drop, reject or redirect what comes in or goes out."""

    drops_in: bool = False
    drops_out: bool = False
    redirects_in: bool = False
    redirects_out: bool = False


def collect(system: System) -> FilterRules | None:
    """Read the rules of nftables, iptables-nft included; None where they cannot be read in full."""
    if os.geteuid() or any((system.read(path) or "").strip() for path in _LEGACY):
        return None
    done = system.run(["nft", "list", "ruleset"], LIMIT_S)
    return parse(done.out) if done.code == 0 else None


@dataclass
class _Block:
    """A chain, or a map of verdicts."""

    hook: str = ""
    lines: list[str] = field(default_factory=list)
    leads_to: set[str] = field(default_factory=set)


def parse(ruleset: str) -> FilterRules:
    """Read what `nft list ruleset` prints."""
    found = FilterRules()
    for blocks in _tables(ruleset):
        for block in blocks.values():
            text = "\n".join(line for name in _reached(blocks, block) for line in name.lines)
            drops, redirects = bool(_DROPS.search(text)), bool(_REDIRECTS.search(text))
            is_in, is_out = block.hook in _HOOKS_IN, block.hook in _HOOKS_OUT
            found = FilterRules(
                drops_in=found.drops_in or (drops and is_in),
                drops_out=found.drops_out or (drops and is_out),
                redirects_in=found.redirects_in or (redirects and is_in),
                redirects_out=found.redirects_out or (redirects and is_out),
            )
    return found


def _tables(ruleset: str) -> Iterator[dict[str, _Block]]:
    blocks: dict[str, _Block] = {}
    block = _Block()
    for line in ruleset.splitlines():
        bare = re.sub(r'"[^"]*"', '""', line)  # a comment may say anything
        words = bare.split()
        if words[:1] == ["table"]:
            yield blocks
            blocks = {}
        elif words[:1] in (["chain"], ["map"]) and len(words) > 1:
            block = blocks.setdefault(words[1], _Block())
        hook = _HOOK.search(bare)
        block.hook = hook[1] if hook is not None else block.hook
        block.lines.append(bare)
        block.leads_to.update(_TO.findall(bare))
    yield blocks


def _reached(blocks: dict[str, _Block], start: _Block) -> Iterator[_Block]:
    seen: set[str] = set()
    left = [start]
    while left:
        block = left.pop()
        yield block
        for name in block.leads_to - seen:
            seen.add(name)
            if name in blocks:
                left.append(blocks[name])
