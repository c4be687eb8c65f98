"""Which parts of the network a transfer crosses: adapter, pair of hosts, host, switch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rankscope_server.diagnose.window import Window
from rankscope_server.observe.transfers import Path

# Slurm's topology plugin: the switches above a node, then the node, "core.leaf3.node-17"
# (slurm.conf(5), srun(1): SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN).
_ADDRESS, _PATTERN = "env.SLURM_TOPOLOGY_ADDR", "env.SLURM_TOPOLOGY_ADDR_PATTERN"


class Part(NamedTuple):
    """A part of the network. `level` orders by size: 0 adapter, 1 pair, 2 host, 3 and up switch."""

    level: int
    name: str
    hosts: tuple[str, ...]


def host_count(window: Window, ranks: Iterable[int]) -> int:
    """Return on how many hosts some ranks run."""
    return len({window.host(rank) for rank in ranks})


def parts_crossed(
    window: Window, members: Mapping[Path, tuple[int, ...]]
) -> tuple[dict[Part, set[Path]], dict[Part, int]]:
    """Return the paths that cross each part, and the parts' sizes in ranks.

    With several hosts only what leaves a host counts: the network is in question.
    """
    crossed: dict[Part, set[Path]] = defaultdict(set)
    size: dict[Part, int] = defaultdict(int)
    on_host: dict[str, int] = defaultdict(int)
    for rank in window.ranks:
        on_host[window.host(rank)] += 1
    switches = {host: switches_of(window, rank) for rank in window.ranks
                if (host := window.host(rank)) and window.ranks[rank].local_rank == 0}  # fmt: skip
    under: dict[Part, set[str]] = defaultdict(set)
    for host, names in switches.items():
        for level, name in enumerate(names):
            under[Part(3 + level, name, ())].add(host)
    for path, ranks in members.items():
        hosts = tuple(dict.fromkeys(window.host(rank) for rank in ranks))
        if len(on_host) > 1 and len(hosts) < 2:
            continue
        parts = [Part(0, f"rank {rank}", (window.host(rank),)) for rank in ranks]
        if len(hosts) > 1:
            parts += [Part(2, host, (host,)) for host in hosts]
            if len(hosts) == 2:
                pair = hosts if isinstance(path, tuple) else tuple(sorted(hosts))
                parts.append(Part(1, f"{pair[0]} to {pair[1]}", pair))
            parts += {Part(3 + level, name, ()) for host in hosts
                      for level, name in enumerate(switches.get(host, ()))}  # fmt: skip
        for part in parts:
            crossed[part].add(path)
    for part in crossed:
        hosts_of = under[part] if part.level > 2 else set(part.hosts)
        size[part] = 1 if part.level < 2 else sum(on_host[host] for host in hosts_of)
    named = {part: _with_hosts(part, under) for part in crossed}
    return {named[part]: paths for part, paths in crossed.items()}, {
        named[part]: size[part] for part in crossed
    }


def _with_hosts(part: Part, under: Mapping[Part, set[str]]) -> Part:
    return part if part.level < 3 else part._replace(hosts=tuple(sorted(under[part])))


def switches_of(window: Window, rank: int) -> tuple[str, ...]:
    """Return the switches above a rank's host, nearest first; nothing where it is not known."""
    address = window.facts.environments.fact(rank, _ADDRESS)
    pattern = window.facts.environments.fact(rank, _PATTERN)
    names = address.split(".")
    if pattern and pattern.split(".")[-1] != "node":
        return ()
    return tuple(name for name in reversed(names[:-1]) if name)
