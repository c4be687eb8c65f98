"""What checks over pairs share: which dials count as evidence, and how to speak of them."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import islice

from rankscope.preflight.checks.base import Run, listed
from rankscope.preflight.checks.blame import Path
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.model import NodeReport

MAX_LINES = 6  # lines of evidence
MAX_PORTS = 4  # in a line
NO_PATH = "no path was measured from there"  # unknown is not healthy
CLOSED: frozenset[DialClass] = frozenset(
    ("refused", "prohibited", "no-arp", "drop", "no-route", "local-firewall", "no-data", "error")
)
SAYS: dict[DialClass, str] = {  # what a node whose listener was up does to a caller
    "drop": "drops", "refused": "refuses", "prohibited": "prohibits", "no-arp": "does not answer",
    "no-route": "has no route for", "local-firewall": "forbids", "error": "fails",
    "no-data": "passes no data on",
}  # fmt: skip
HOW: dict[DialClass, str] = {"no-data": "accepted, but no data"}  # classes that are no word
SEEN: dict[DialClass, str] = {  # what a caller knows of a node that never reported
    "ok": "its port {port} answers, but no report came: large packets may be lost",
    "refused": "{address} is up, nothing listens on port {port}: not started there, or rejected",
    "prohibited": "a firewall rejects port {port} of {address} (admin-prohibited)",
    "no-arp": "no host on the link has the address {address}: host down, or its link",
    "drop": "no answer within {elapsed_s:.1f} s on port {port}: host down, or a firewall drops",
    "no-route": "no route to {address}",
    "no-local-port": "it has no local port left for a call to {address}:{port}",
    "local-firewall": "its own firewall forbids the call to {address}:{port}",
    "no-data": "{address}:{port} accepts and then sends nothing ({errno})",
    "no-answer": "{address}:{port} accepts and then sends nothing",
    "other-run": "{answered_by} of another preflight, {banner}, answers on {address}:{port}",
    "other-version": "{banner} answers on {address}:{port}: bring all nodes to one version",
    "other-secret": "an agent with another secret answers on {address}:{port}",
    "not-us": "another program answers on {address}:{port}",
    "wrong-host": "{address} is answered by {answered_by}",
    "unresolved": "the name does not resolve ({errno})",
    "large-stall": "small messages pass, large ones do not",
    "error": "{errno} on port {port} of {address}",
}


def ordered(run: Run, nodes: Collection[str]) -> tuple[str, ...]:
    """Return `nodes` in the order of the run."""
    place = {name: number for number, name in enumerate(run.expected)}
    return tuple(sorted(nodes, key=lambda name: (place.get(name, len(place)), name)))


def arrows(paths: Collection[Path]) -> str:
    """Return paths for a title: "node0->node1, node2->node1"."""
    return listed([f"{start}->{end}" for start, end in paths])


def owners(run: Run) -> Mapping[str, frozenset[str]]:
    """Return which nodes have an address on one of their interfaces."""
    found: dict[str, set[str]] = defaultdict(set)
    for report in run.present:
        for address in report.addresses:
            found[address].add(report.node)
    return {address: frozenset(nodes) for address, nodes in found.items()}


def is_evidence(owned: Mapping[str, frozenset[str]], end: str, dial: Dial) -> bool:
    """Return whether a dial is evidence about `end` itself.

    One that failed at an address which `end` alone does not have is evidence about that address.
    """
    return dial.outcome == "ok" or owned.get(dial.address, frozenset()) == {end}


def is_untried(report: NodeReport | None, edge: EdgeFacts) -> bool:
    """Return whether a node was only called before it listened: it came late, and has reported."""
    dial = edge.mesh
    is_listening = report is not None and bool(report.listening.ephemeral)
    return is_listening and not edge.ephemeral and dial is not None and dial.outcome in CLOSED


@lru_cache(maxsize=4096)  # asked for every pair: 64,000 times with 1,000 nodes
def is_loopback(address: str) -> bool:
    """Return whether an address never leaves its host."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def worst(dials: Collection[Dial]) -> DialClass:
    """Return how most of the failed dials ended."""
    return Counter(d.outcome for d in dials if d.outcome != "ok").most_common(1)[0][0]


def dial_line(start: str, end: str, dials: Collection[Dial]) -> str:
    """Return a line of evidence: "node0->node1  drop 1.5 s  ports 33000, 47000  (10.77.0.2)"."""
    failed = [dial for dial in dials if dial.outcome != "ok"]
    took = max(dial.elapsed_ms for dial in failed)
    time = f"{took / 1e3:.1f} s" if took >= 100 else f"{took:.1f} ms"
    more = f" and {len(failed) - MAX_PORTS} more" if len(failed) > MAX_PORTS else ""
    ports = ", ".join(str(dial.port) for dial in failed[:MAX_PORTS]) + more
    word = "port" if len(failed) == 1 else "ports"
    how = f"{HOW.get(failed[0].outcome, failed[0].outcome)} {time}"
    return f"{start}->{end}  {how}  {word} {ports} of {failed[0].address}"


def shortened(lines: Iterable[str]) -> tuple[str, ...]:
    """Return at most six lines, the last one with the number of those left out."""
    left = iter(lines)
    some = list(islice(left, MAX_LINES))
    num_left = sum(1 for _ in left)
    return tuple(some) if not num_left else (*some[:-1], f"and {num_left + 1:,} more")


def interface_towards(run: Run, node: str, peer: str = "") -> Interface | None:
    """Return the interface by which `node` reaches `peer`, else the one that gloo takes there."""
    report = run.reports.get(node)
    if report is None or report.facts.interfaces is None:
        return None
    facts = report.facts.interfaces
    edge = report.edges.get(peer)
    wanted = (edge.source_address if edge is not None else "") or run.gloo_address(node)
    for interface in facts.interfaces:
        if wanted in [address.partition("/")[0] for address in interface.addresses]:
            return interface
    return None


def gloo_dials(run: Run, start: str, end: str) -> bool | None:
    """Return whether gloo on `start` dials `end`: the higher address dials the lower one.

    It compares the bytes (`memcmp`), so 9.x is below 10.x. None: an address is not known.
    """
    ours, theirs = run.gloo_address(start), run.gloo_address(end)
    try:
        return ipaddress.ip_address(ours).packed > ipaddress.ip_address(theirs).packed
    except ValueError:
        return None
