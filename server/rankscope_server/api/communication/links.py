"""Bandwidths from node to node: of messages of the run, and what its preflight measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rankscope_server.api.communication.calls import Transfers, hosts_of
from rankscope_server.findings.statistics import Array

Source: TypeAlias = Literal["messages", "preflight"]
Pair = tuple[str, str]  # from, to
_LEAST_MESSAGES = 3  # of a size class, for a median
_BEST_SHARE = 95  # percent


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the way from one node to another."""

    bytes_per_second: float
    source: Source
    count: int  # messages; 1 for a preflight
    size_bytes: int  # of the messages; 0 for a preflight
    is_at_least: bool = False  # a part of the time may be waiting: the link may be faster


def links_of_messages(found: Transfers, host_of: Mapping[int, str]) -> dict[Pair, Link]:
    """Return the bandwidth of each pair of nodes, of its largest messages: small ones show delay.

    Largest is the highest size class of which there are some.
    """
    if not len(found.sender):
        return {}
    hosts = sorted(set(host_of.values()))
    start, end = (hosts_of(ranks, host_of) for ranks in (found.sender, found.receiver))
    links = {}
    known = (start >= 0) & (end >= 0) & (found.size_bytes > 0)
    for code in np.unique((start * len(hosts) + end)[known]).tolist():
        one, other = divmod(code, len(hosts))
        here = np.flatnonzero(known & (start == one) & (end == other))
        links[hosts[one], hosts[other]] = _link(found, here)
    return links


def _link(found: Transfers, here: Array) -> Link:
    """Return what messages of one link show, by those whose time is exact, where there are some."""
    exact = here[~found.is_at_most[here]]
    is_at_least = len(exact) == 0
    here = here if is_at_least else exact
    octave = np.floor(np.log2(np.maximum(found.size_bytes[here], 1)))
    classes, counts = np.unique(octave, return_counts=True)
    enough = classes[counts >= min(_LEAST_MESSAGES, counts.max())]
    largest = here[octave == enough[-1]]
    speed = found.size_bytes[largest] / (found.took_ns[largest] / 1e9)
    # of lower bounds the highest ones are closest to the truth
    share = _BEST_SHARE if is_at_least else 50
    size = int(np.median(found.size_bytes[largest]))
    return Link(float(np.percentile(speed, share)), "messages", len(largest), size, is_at_least)


def links_of_preflight(mbit_per_s: Mapping[Pair, float]) -> dict[Pair, Link]:
    """Return what a preflight measured between nodes."""
    return {
        pair: Link(speed * 1e6 / 8, "preflight", 1, 0)
        for pair, speed in mbit_per_s.items()
        if speed >= 0  # 0: nothing came through
    }


@dataclass(frozen=True, slots=True)
class Expected:
    """The slowest measured link between nodes of a group."""

    bytes_per_second: float
    start: str
    end: str
    num_measured: int  # ways between its nodes
    num_ways: int


def expected_of(hosts: Iterable[str], measured: Mapping[Pair, Link]) -> Expected | None:
    """Return what the links between these nodes carry; None where none was measured.

    A ring, over which nccl-tests define the bus bandwidth, is as fast as its slowest link.
    """
    names = sorted(set(hosts) - {""})
    ways = [(one, other) for one in names for other in names if one != other]
    known = [(measured[way].bytes_per_second, way) for way in ways if way in measured]
    if not known:
        return None
    speed, (start, end) = min(known)
    return Expected(speed, start, end, len(known), len(ways))


def shown_hosts(hosts: Sequence[str], links: Mapping[Pair, Link], most: int) -> list[str]:
    """Return all nodes, or those at the slowest links: the worst must not be cut."""
    if len(hosts) <= most:
        return list(hosts)
    chosen: dict[str, None] = {}
    for pair in sorted(links, key=lambda pair: links[pair].bytes_per_second):
        chosen |= dict.fromkeys(pair)
    first = [host for host in chosen if host in set(hosts)][:most]
    first += [host for host in hosts if host not in set(first)][: most - len(first)]
    return [host for host in hosts if host in set(first)]


@dataclass(frozen=True, slots=True)
class NodeWays:
    """The measured ways of one node, to it and from it: the slowest of them, and how many."""

    node: str
    start: str
    end: str
    link: Link
    median_bytes_per_second: float
    num_measured: int


def by_node(hosts: Sequence[str], links: Mapping[Pair, Link]) -> list[NodeWays]:
    """Return each node by the slowest way between it and another, that with the slowest first.

    Nodes of which no way is measured are left out.
    """
    own: dict[str, list[Pair]] = {host: [] for host in hosts}
    for start, end in links:
        if start != end and start in own and end in own:
            own[start].append((start, end))
            own[end].append((start, end))
    found = []
    for node, ways in own.items():
        if ways:
            speeds = [links[way].bytes_per_second for way in ways]
            way = ways[int(np.argmin(speeds))]
            middle = float(np.median(speeds))
            found.append(NodeWays(node, *way, links[way], middle, len(ways)))
    return sorted(found, key=lambda one: one.link.bytes_per_second)
