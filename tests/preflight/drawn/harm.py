"""What a remedy must leave as it is: other programs, rules, names and routes, other nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import World
from tests.preflight.scene import Scene

_TELNET = "table inet keep {\nchain c {\ntype filter hook input priority 20; policy accept;\n"
_TELNET += "tcp dport 23 drop\n}\n}\n"
_NEIGHBOUR = "192.0.2.77 storage.example.org storage"
_ROUTE = "198.51.100.0/24"
_SERVICE_PORT = 8080
_PROGRAMS = (str(tools.PROGRAM), "http.server")  # none of them is a job's


@dataclass(frozen=True)
class Node:
    """One node as it is."""

    rules: tuple[str, ...]
    addresses: str
    routes: str
    hosts: tuple[str, ...]
    host_name: str
    names: tuple[str, ...]  # by peer: the addresses that its name has here
    programs: tuple[str, ...]  # that listen


def plant(scene: Scene) -> None:
    """Give every node what belongs to others: a service, a rule, a route, a line of its hosts."""
    for number in scene.everywhere:
        tools.middle(scene, number, _SERVICE_PORT, "http")
        scene.nft(number, _TELNET)
        scene.lab.run(
            number, f"echo '{_NEIGHBOUR}' >> /etc/hosts; ip route add unreachable {_ROUTE}"
        )


def look(scene: Scene) -> list[Node]:
    """Return every node as it is."""
    return [_node(scene, number) for number in scene.everywhere]


def _node(scene: Scene, number: int) -> Node:
    def said(command: str) -> str:
        return scene.lab.run(number, command, check=False).stdout

    names = [
        " ".join(sorted({line.split()[0] for line in said(f"getent ahosts {name}").splitlines()}))
        for name in scene.lab.names
    ]
    listening = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done"
    programs = [
        line for line in said(listening).splitlines() if any(mark in line for mark in _PROGRAMS)
    ]
    return Node(
        tuple(line.strip() for line in said("nft list ruleset").splitlines()),
        # a new address is tentative for a second or two, whatever anyone does
        said("ip -o address show | sed 's/ tentative//; s/valid_lft.*//'"),
        said("ip rule; ip route show table all | grep -v 'table local'"),
        tuple(said("cat /etc/hosts").splitlines()), said("hostname"), tuple(names),
        tuple(sorted(programs)),
    )  # fmt: skip


def done(
    world: World, before: list[Node], after: list[Node], named: Collection[str]
) -> list[str]:  # fmt: skip
    """Return the harm that was done between two looks, by commands on the nodes `named`."""
    harm = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        name = f"node{number}"
        if name not in named and old != new:
            harm.append(f"{name} has changed, and no command was for it")
        harm += [f"{name}: {text}" for text in _of_node(old, new)]
        for peer, (first, then) in enumerate(zip(old.names, new.names, strict=True)):
            addresses = before[peer].addresses + after[peer].addresses
            new_ones = set(then.split()) - set(first.split())
            lies = [a for a in new_ones if a != world.ip(peer) and f" {a}/" not in addresses]
            harm += [f"{name}: the name node{peer} now leads to {a}" for a in lies]
    return harm


def _of_node(old: Node, new: Node) -> list[str]:
    harm = []
    if gone := set(old.programs) - set(new.programs):
        harm.append(f"ended another's program: {sorted(gone)[0][-60:]}")
    rules = [line for line in old.rules if _is_foreign(line) and line not in new.rules]
    harm += [f"removed another's rule: {line}" for line in rules[:1]]
    if _NEIGHBOUR in old.hosts and _NEIGHBOUR not in new.hosts:
        harm.append("removed another's line of /etc/hosts")
    if _ROUTE in old.routes and _ROUTE not in new.routes:
        harm.append("removed another's route")
    return harm


def _is_foreign(line: str) -> bool:
    return line.startswith("table ") or line == "tcp dport 23 drop"
