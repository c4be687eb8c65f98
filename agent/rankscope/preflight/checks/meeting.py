"""Where the nodes believe that they meet, and to whom that leads."""

from __future__ import annotations

import ipaddress
import shlex
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.model import Fix

NO_NODE = ""  # the address of the endpoint is none of any node, and no agent answered there


def is_local(name: str) -> bool:
    """Return whether a host name or address always means the machine itself."""
    if name.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


@lru_cache(maxsize=4096)  # asked for every pair: 64,000 times with 1,000 nodes
def is_address(text: str) -> bool:
    """Return whether this is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def said_by(run: Run, node: str) -> str:
    """Return MASTER_ADDR as a node was given it; "" where it was not said."""
    report, launch = run.reports[node], run.launches.get(node)
    if launch is not None and launch.rendezvous_backend not in ("", "static", "c10d"):
        return ""  # the nodes meet at a server of etcd, which is none of them
    if report.endpoint is not None:
        return report.endpoint.name if report.endpoint.is_said else ""
    return launch.master_addr if launch is not None else ""


def addresses_of(run: Run, node: str) -> tuple[str, ...]:
    """Return what a node's endpoint resolves to there."""
    report, names = run.reports[node], run.reports[node].facts.names
    if report.endpoint is not None and report.endpoint.addresses:
        return report.endpoint.addresses
    name = said_by(run, node)
    if names is not None and names.master is not None and names.master.name == name:
        return names.master.addresses
    return (name,) if is_address(name) else ()


def dial_of(run: Run, node: str) -> Dial | None:
    """Return how the call of a node to its own endpoint ended."""
    endpoint = run.reports[node].endpoint
    return endpoint.dial if endpoint is not None else None


def leads_to(run: Run, node: str, owned: Mapping[str, frozenset[str]]) -> str | None:
    """Return the node to which the endpoint of `node` leads; NO_NODE, or None if it is not known.

    The handshake says who answers: an address that no node has may still lead to one of them (a
    virtual or translated address, a load balancer). Where none answers, its owner counts.
    """
    name = said_by(run, node)
    if not name:
        return None
    if is_local(name):
        return node
    dial = dial_of(run, node)
    if dial is not None and dial.outcome == "ok":
        return dial.answered_by
    addresses = addresses_of(run, node)
    if not addresses:
        return None
    holders = [one for address in addresses for one in sorted(owned.get(address, ()))]
    if run.master in holders:
        return run.master
    return holders[0] if holders else NO_NODE


def meant_by(run: Run, name: str, owned: Mapping[str, frozenset[str]]) -> str:
    """Return the node that a name of the endpoint means: one of that name, else as most find.

    NO_NODE where it is not known. Which node has rank 0 does not matter: a name belongs to a host,
    not to a rank.
    """
    if name in run.expected:
        return name
    hosts = {node: host.hostname for node, host in run.each(lambda facts: facts.host).items()}
    same = [node for node, hostname in hosts.items() if hostname == name]
    if len(same) == 1:
        return same[0]
    found = Counter(
        lead
        for report in run.present
        if said_by(run, report.node) == name and not is_loop(run, report.node)
        if (lead := leads_to(run, report.node, owned))
    )
    if not found:
        return NO_NODE
    (best, votes), *rest = found.most_common()
    return best if not rest or votes > rest[0][1] or best == run.master else NO_NODE


def is_loop(run: Run, node: str) -> bool:
    """Return whether the endpoint resolves to loopback there."""
    return any(is_local(address) for address in addresses_of(run, node))


def point_to(run: Run, where: str, node: str = "") -> Fix:
    """Return the setting that has `node` ("": every node) look for the store at `where`."""
    if run.mode == "c10d":
        host = f"[{where}]" if ":" in where else where
        endpoint = shlex.quote(f"{host}:{run.master_port}")
        return Fix(node=node, command=f"torchrun --rdzv-endpoint {endpoint} ...")
    by_torchrun = run.mode == "static" and any(
        launch.launcher != "hand" for launch in run.launches.values()
    )
    if by_torchrun:
        return Fix(node=node, command=f"torchrun --master-addr {shlex.quote(where)} ...")
    return Fix(node=node, command=f"export MASTER_ADDR={shlex.quote(where)}")


def way_to(run: Run, node: str) -> str:
    """Return how all others can call `node`: its name where that works everywhere, or an address.

    What cannot be said for sure is still the address that gloo takes there.
    """
    peers = [report for report in run.present if report.node != node]
    by_name = [edge for report in peers if (edge := report.edges.get(node)) is not None]
    if by_name and all(
        edge.resolved is not None
        and edge.resolved.name == node
        and edge.mesh is not None
        and edge.mesh.outcome == "ok"
        for edge in by_name
    ):
        return node
    report = run.reports.get(node)
    own = [one for one in (report.addresses if report is not None else ()) if is_address(one)]
    reached = Counter(
        dial.address
        for edge in by_name
        for dial in (edge.mesh, *edge.ephemeral)
        if dial is not None and dial.outcome == "ok" and dial.address in own
    )
    if reached:
        return reached.most_common(1)[0][0]
    chosen = run.gloo_address(node)
    return chosen if chosen in own else next((one for one in own if ":" not in one), node)
