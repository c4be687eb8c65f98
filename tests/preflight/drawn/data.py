"""Connections that are accepted and carry no data, or another program's data."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import Case, Catalogue, World, at, between, wanted, warned
from tests.preflight.scene import Scene

KINDS = Catalogue()
kind = KINDS.add
RANDOM = "32768-60999"
_MESH_PORTS = (15001, 15006, 10808)
_SPEAKING = ("tls", "http", "banner", "echo")


def _data(
    world: World, number: int, dport: str, verdict: str, source: int | None = None
) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        rules = tools.data_rules(dport, tools.VERDICTS[verdict])
        origin = f"ip saddr {world.ip(source)} " if source is not None else ""
        tools.filter_table(scene, number, *(origin + rule for rule in rules))

    return inject


def _random_ports(verdict: str) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        number = rng.choice(world.dialled)
        return Case(
            f"node{number} lets handshakes on random ports through, data: {verdict}",
            _data(world, number, RANDOM, verdict),
            wanted("port.ephemeral", at(number)),
        )

    return draw


def _master(verdict: str) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        return Case(
            f"node0 lets handshakes on MASTER_PORT through, data: {verdict}",
            _data(world, 0, str(world.master_port), verdict),
            wanted("port.master.reach", at(0)),
        )

    return draw


kind("data-drop-random", "data", "breaks")(_random_ports("drop"))
kind("data-reset-random", "data", "breaks")(_random_ports("reset"))
kind("data-drop-master", "data", "breaks")(_master("drop"))
kind("data-reset-master", "data", "breaks")(_master("reset"))


@kind("data-unused", "data", "works")
def data_unused(world: World, rng: random.Random) -> Case:
    number, verdict = world.by_address[-1], rng.choice(("drop", "reset"))
    return Case(
        f"node{number}, which no node dials, lets handshakes through, data: {verdict}",
        _data(world, number, RANDOM, verdict),
        warned("port.ephemeral port.oneway", at(number),
               between(*((other, number) for other in world.dialled))),
    )  # fmt: skip


@kind("data-master-all", "data", "breaks")
def data_master_all(world: World, rng: random.Random) -> Case:
    verdict = rng.choice(("drop", "reset"))
    return Case(
        f"node0 lets handshakes on all ports through, data: {verdict}",
        _data(world, 0, "1024-65535", verdict),
        wanted("port.ephemeral port.master.reach", at(0)),
        options=tools.SHARED,
    )


@kind("data-pair", "data", "breaks")
def data_pair(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)
    verdict = rng.choice(("drop", "reset"))

    def inject(scene: Scene) -> None:
        _data(world, one, RANDOM, verdict, other)(scene)
        _data(world, other, RANDOM, verdict, one)(scene)

    return Case(
        f"between node{one} and node{other} handshakes on random ports pass, data: {verdict}",
        inject, wanted("port.ephemeral", between((one, other))),
    )  # fmt: skip


@kind("data-oneway-used", "data", "breaks")
def data_oneway_used(world: World, rng: random.Random) -> Case:
    low, high = sorted(rng.sample(world.everywhere, 2), key=world.by_address.index)
    verdict = rng.choice(("drop", "reset"))
    return Case(
        f"node{low} lets handshakes of node{high}, which dials it, through; data: {verdict}",
        _data(world, low, RANDOM, verdict, high),
        wanted("port.oneway port.ephemeral", between((low, high))),
    )


@kind("data-oneway-unused", "data", "works")
def data_oneway_unused(world: World, rng: random.Random) -> Case:
    low, high = sorted(rng.sample(world.everywhere, 2), key=world.by_address.index)
    verdict = rng.choice(("drop", "reset"))
    return Case(
        f"node{high} lets handshakes of node{low}, which never dials it, through; data: {verdict}",
        _data(world, high, RANDOM, verdict, low),
        warned("port.oneway", between((low, high))),
    )


@kind("data-cut", "data", "breaks")
def data_cut(world: World, rng: random.Random) -> Case:
    number, num_packets = rng.choice(world.dialled), rng.randrange(3, 11)
    verdict = rng.choice(("drop", "reset"))

    def inject(scene: Scene) -> None:
        scene.lab.run(number, "sysctl -qw net.netfilter.nf_conntrack_acct=1")
        rule = f"tcp dport {RANDOM} ct direction original ct original packets > {num_packets}"
        tools.filter_table(scene, number, f"{rule} {tools.VERDICTS[verdict]}")

    return Case(
        f"node{number} knows after {num_packets} packets that it is no web traffic: {verdict}",
        inject, wanted("port.ephemeral", at(number)),
    )  # fmt: skip


@kind("syn-proxy", "data", "breaks")
def syn_proxy(world: World, rng: random.Random) -> Case:
    """Draw the classical mistake: a SYN proxy, and connections picked up in the middle."""
    number = rng.choice(world.dialled)

    def inject(scene: Scene) -> None:
        scene.nft(
            number,
            "table ip guard {\n"
            "chain raw {\ntype filter hook prerouting priority raw; policy accept;\n"
            f"iif lo accept\ntcp dport {RANDOM} tcp flags & (syn|ack) == syn notrack\n}}\n"
            "chain in {\ntype filter hook input priority 0; policy accept;\niif lo accept\n"
            f"tcp dport {RANDOM} ct state invalid,untracked"
            " synproxy mss 1460 wscale 7 timestamp sack-perm\n}\n}\n",
        )

    return Case(
        f"a SYN proxy on node{number} answers for random ports and loses what follows", inject,
        wanted("port.ephemeral port.intercepted", at(number)),
    )  # fmt: skip


def _outgoing(manners: tuple[str, ...], ids: str) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        number, manner = rng.choice(world.dialling), rng.choice(manners)
        port = rng.choice(_MESH_PORTS)

        def inject(scene: Scene) -> None:
            tools.middle(scene, number, port, manner)
            match = f"ip daddr {world.net}.0/24 tcp dport {RANDOM}"
            tools.redirect(scene, number, match, port, hook="output")

        return Case(
            f"node{number}'s outgoing random ports go to a sidecar on {port} ({manner})",
            inject, wanted(ids, at(number)),
        )  # fmt: skip

    return draw


def _incoming(manners: tuple[str, ...], ids: str) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        number, manner = rng.choice(world.dialled), rng.choice(manners)
        port = rng.choice(_MESH_PORTS)

        def inject(scene: Scene) -> None:
            tools.middle(scene, number, port, manner)
            tools.redirect(scene, number, f"tcp dport {RANDOM}", port, hook="prerouting")

        return Case(
            f"node{number}'s incoming random ports go to a sidecar on {port} ({manner})",
            inject, wanted(ids, at(number)),
        )  # fmt: skip

    return draw


_SILENT = ("hang", "close")
_EITHER = "port.intercepted port.ephemeral"  # who says nothing cannot be told from a firewall
kind("sidecar-out", "data", "breaks")(_outgoing(_SPEAKING, "port.intercepted"))
kind("sidecar-out-silent", "data", "breaks")(_outgoing(_SILENT, _EITHER))
kind("sidecar-in", "data", "breaks")(_incoming(_SPEAKING, "port.intercepted"))
kind("sidecar-in-silent", "data", "breaks")(_incoming(_SILENT, _EITHER))


@kind("sidecar-everywhere", "data", "breaks")
def sidecar_everywhere(world: World, rng: random.Random) -> Case:
    manner, port = rng.choice(_SPEAKING), rng.choice(_MESH_PORTS)

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            tools.middle(scene, number, port, manner)
            match = f"ip daddr {world.net}.0/24 tcp dport {RANDOM}"
            tools.redirect(scene, number, match, port, hook="output")

    return Case(
        f"the outgoing random ports of all nodes go to sidecars on {port} ({manner})", inject,
        wanted("port.intercepted", at(*world.everywhere)),
    )  # fmt: skip


@kind("sidecar-master", "data", "breaks")
def sidecar_master(world: World, rng: random.Random) -> Case:
    number = rng.choice(list(world.everywhere)[1:])
    manner, port = rng.choice(_SPEAKING), rng.choice(_MESH_PORTS)

    def inject(scene: Scene) -> None:
        tools.middle(scene, number, port, manner)
        match = f"ip daddr {world.net}.0/24 tcp dport {world.master_port}"
        tools.redirect(scene, number, match, port, hook="output")

    return Case(
        f"node{number}'s connections to MASTER_PORT go to a local proxy ({manner})", inject,
        wanted("port.master.identity", at(number), between((0, number))),
    )  # fmt: skip


@kind("sidecar-all-out", "data", "breaks")
def sidecar_all_out(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.dialling[-1:])
    manner, port = rng.choice(_SPEAKING), rng.choice(_MESH_PORTS)

    def inject(scene: Scene) -> None:
        tools.middle(scene, number, port, manner)
        match = f"ip daddr {world.net}.0/24 tcp dport 1024-65535"
        tools.redirect(scene, number, match, port, hook="output")

    ids = "port.intercepted" if number == 0 else "port.intercepted port.master.identity"
    return Case(
        f"all outgoing connections of node{number} go to a sidecar ({manner})", inject,
        wanted(ids, at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("proxy-at-master", "data", "breaks")
def proxy_at_master(world: World, rng: random.Random) -> Case:
    manner = rng.choice(_SPEAKING)

    def inject(scene: Scene) -> None:
        tools.middle(scene, 0, 18080, manner)
        tools.redirect(scene, 0, f"tcp dport {world.master_port}", 18080, hook="prerouting")

    return Case(
        f"what comes to MASTER_PORT of node0 goes to a proxy there ({manner})", inject,
        wanted("port.master.identity", at(0)),
    )  # fmt: skip


@kind("master-port-taken", "data", "breaks")
def master_port_taken(world: World, rng: random.Random) -> Case:
    manner = rng.choice((*_SPEAKING, "hang", "close"))

    def inject(scene: Scene) -> None:
        tools.middle(scene, 0, world.master_port, manner)

    return Case(
        f"another program holds MASTER_PORT on node0 ({manner})", inject,
        wanted("port.master.free", at(0)),
    )  # fmt: skip


@kind("port-taken-elsewhere", "data", "works", remedy="none")
def port_taken_elsewhere(world: World, rng: random.Random) -> Case:
    number = rng.choice(list(world.everywhere)[1:])
    manner = rng.choice((*_SPEAKING, "hang", "close"))

    def inject(scene: Scene) -> None:
        tools.middle(scene, number, world.master_port, manner)

    return Case(
        f"another program holds MASTER_PORT on node{number}, which is not the master ({manner})",
        inject,
        warned("port.master.free port.master.identity", at(number), is_optional=True),
    )
