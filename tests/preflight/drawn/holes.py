"""Ports that are closed: all of them, a part, one direction, at a node or on the way."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import (
    RANDOM_PORTS,
    Case,
    Catalogue,
    Wanted,
    World,
    at,
    between,
    wanted,
    warned,
)  # fmt: skip
from tests.preflight.scene import Scene

KINDS = Catalogue()
kind = KINDS.add
_VERDICTS = tuple(tools.VERDICTS)
ALL = tools.ports(*RANDOM_PORTS)
_STATELESS = "tcp flags & (syn|ack) == syn"


def part(share: int, rng: random.Random, *, is_high: bool = False) -> tuple[int, int]:
    """Return one in `share` of the random ports, of those on which gloo listens or of the others.

    gloo's listener may reuse addresses; for such a one Linux takes from the lower half first.
    """
    low, high = RANDOM_PORTS
    size = (high - low + 1) // share
    middle = (low + high) // 2
    start = (
        rng.randrange(middle + 1, high - size + 2)
        if is_high
        else (rng.randrange(low, max(low, middle - size) + 1))
    )
    return start, start + size - 1


def _closed(number: int, match: str, verdict: str, hook: str = "input") -> Callable[[Scene], None]:
    return lambda scene: tools.filter_table(
        scene, number, f"{match} {tools.VERDICTS[verdict]}", hook=hook
    )


def _inbound(
    name: str, share: int, says: str, truth: str = "sometimes"
) -> None:  # fmt: skip
    def draw(world: World, rng: random.Random) -> Case:
        number, verdict = rng.choice(world.dialled), rng.choice(_VERDICTS)
        low, high = part(share, rng) if share > 1 else RANDOM_PORTS
        return Case(
            f"node{number}: {says} ({low}-{high}) closed, {verdict}",
            _closed(number, tools.ports(low, high), verdict),
            wanted("port.ephemeral", at(number)),
        )

    kind(name, "holes", truth, remedy="command")(draw)  # type: ignore[arg-type]


_inbound("random-closed", 1, "the random ports", "breaks")
_inbound("random-half", 2, "the lower half of the random ports", "breaks")
_inbound("random-third", 3, "a third of the random ports")
_inbound("random-seventh", 7, "a seventh of the random ports")


def _high(share: int) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        number, verdict = rng.choice(world.dialled), rng.choice(_VERDICTS)
        low, high = part(share, rng, is_high=True)
        return Case(
            f"node{number}: {low}-{high} closed ({verdict}), on which gloo does not listen",
            _closed(number, tools.ports(low, high), verdict),
            warned("port.ephemeral", at(number), is_optional=True),
        )

    return draw


kind("half-high", "holes", "works")(_high(2))
kind("third-high", "holes", "works")(_high(3))


def _pair(world: World, rng: random.Random, share: int) -> Case:
    one, other = rng.sample(world.everywhere, 2)
    verdict = rng.choice(_VERDICTS)
    low, high = part(share, rng) if share > 1 else RANDOM_PORTS

    def inject(scene: Scene) -> None:
        for here, there in ((one, other), (other, one)):
            match = f"ip saddr {world.ip(there)} {tools.ports(low, high)}"
            _closed(here, match, verdict)(scene)

    return Case(
        f"between node{one} and node{other}: {low}-{high} closed, {verdict}", inject,
        wanted("port.ephemeral", between((one, other))),
    )  # fmt: skip


@kind("pair-closed", "holes", "breaks", remedy="command")
def pair_closed(world: World, rng: random.Random) -> Case:
    return _pair(world, rng, 1)


@kind("pair-third", "holes", "sometimes", remedy="command")
def pair_third(world: World, rng: random.Random) -> Case:
    return _pair(world, rng, 3)


def _unused(world: World) -> Wanted:
    number = world.by_address[-1]
    return warned(
        "port.ephemeral port.oneway", at(number),
        between(*((other, number) for other in world.dialled)),
    )  # fmt: skip


@kind("random-unused", "holes", "works")
def random_unused(world: World, rng: random.Random) -> Case:
    number, verdict = world.by_address[-1], rng.choice(_VERDICTS)
    return Case(
        f"node{number}, which no node dials: the random ports closed, {verdict}",
        _closed(number, ALL, verdict), _unused(world),
    )  # fmt: skip


@kind("third-unused", "holes", "works")
def third_unused(world: World, rng: random.Random) -> Case:
    number, verdict = world.by_address[-1], rng.choice(_VERDICTS)
    low, high = part(3, rng)
    return Case(
        f"node{number}, which no node dials: {low}-{high} closed, {verdict}",
        _closed(number, tools.ports(low, high), verdict), _unused(world),
    )  # fmt: skip


def _oneway(is_used: bool, share: int) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        low, high = sorted(rng.sample(world.everywhere, 2), key=world.by_address.index)
        start, end = (high, low) if is_used else (low, high)
        verdict = rng.choice(_VERDICTS)
        ports = part(share, rng) if share > 1 else RANDOM_PORTS
        match = f"ip saddr {world.ip(start)} {tools.ports(*ports)}"
        wants = wanted if is_used else warned
        ids = "port.oneway port.ephemeral" if share > 1 and is_used else "port.oneway"
        return Case(
            f"from node{start} to node{end} only: {ports[0]}-{ports[1]} closed, {verdict}",
            _closed(end, match, verdict), wants(ids, between((start, end))),
        )  # fmt: skip

    return draw


kind("oneway-used", "holes", "breaks", remedy="command")(_oneway(True, 1))
kind("oneway-unused", "holes", "works")(_oneway(False, 1))
kind("oneway-third-used", "holes", "sometimes", remedy="command")(_oneway(True, 3))
kind("oneway-third-unused", "holes", "works")(_oneway(False, 3))


@kind("egress-random", "holes", "breaks", remedy="command")
def egress_random(world: World, rng: random.Random) -> Case:
    number, verdict = rng.choice(world.dialling), rng.choice(_VERDICTS)
    return Case(
        f"node{number} lets nothing out to random ports ({verdict})",
        _closed(number, ALL, verdict, hook="output"),
        wanted("port.ephemeral", at(number)),
    )


@kind("egress-third", "holes", "sometimes", remedy="command")
def egress_third(world: World, rng: random.Random) -> Case:
    number, verdict = rng.choice(world.dialling), rng.choice(_VERDICTS)
    low, high = part(3, rng)
    return Case(
        f"node{number} lets nothing out to {low}-{high} ({verdict})",
        _closed(number, tools.ports(low, high), verdict, hook="output"),
        wanted("port.ephemeral", at(number)),
    )


@kind("egress-master", "holes", "breaks", remedy="command")
def egress_master(world: World, rng: random.Random) -> Case:
    number, verdict = rng.choice(list(world.everywhere)[1:]), rng.choice(_VERDICTS)
    return Case(
        f"node{number} lets nothing out to MASTER_PORT ({verdict})",
        _closed(number, f"tcp dport {world.master_port} ct state new", verdict, hook="output"),
        wanted("port.master.reach", at(number), between((0, number))),
    )


@kind("master-closed", "holes", "breaks", remedy="command")
def master_closed(world: World, rng: random.Random) -> Case:
    verdict = rng.choice(_VERDICTS)
    return Case(
        f"node0: MASTER_PORT closed ({verdict})",
        _closed(0, f"tcp dport {world.master_port}", verdict),
        wanted("port.master.reach", at(0)),
    )


@kind("master-closed-to-one", "holes", "breaks", remedy="command")
def master_closed_to_one(world: World, rng: random.Random) -> Case:
    number, verdict = rng.choice(list(world.everywhere)[1:]), rng.choice(_VERDICTS)
    match = f"ip saddr {world.ip(number)} tcp dport {world.master_port}"
    return Case(
        f"node0: MASTER_PORT closed to node{number} ({verdict})", _closed(0, match, verdict),
        wanted("port.master.reach", between((0, number))),
    )  # fmt: skip


@kind("policy-drop", "holes", "breaks", remedy="command")
def policy_drop(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.dialled)
    last = rng.choice(("", "drop", "counter reject", 'counter drop comment "all else"'))

    def inject(scene: Scene) -> None:
        scene.firewall(
            number, "ct state established,related accept", "icmp type echo-request accept",
            f"tcp dport {{ 22, {world.master_port} }} accept", last,
            policy="accept" if last else "drop",
        )  # fmt: skip

    return Case(
        f"node{number}: a default-deny firewall that knows ssh and MASTER_PORT only", inject,
        wanted("port.ephemeral", at(number)),
    )  # fmt: skip


@kind("netdev-ingress", "holes", "breaks")
def netdev_ingress(world: World, rng: random.Random) -> Case:
    """Draw a filter in front of the firewall, where no rule of an input chain helps."""
    number = rng.choice(world.dialled)

    def inject(scene: Scene) -> None:
        head = "type filter hook ingress device eth0 priority 0; policy accept;"
        rule = f"{_STATELESS} tcp dport {RANDOM_PORTS[0]}-{RANDOM_PORTS[1]} drop"
        scene.nft(number, f"table netdev early {{\nchain c {{\n{head}\n{rule}\n}}\n}}\n")

    return Case(
        f"node{number}: random ports dropped in the netdev hook", inject,
        wanted("port.ephemeral", at(number)),
    )  # fmt: skip


@kind("wire-node", "holes", "breaks")
def wire_node(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.dialled)
    rule = f"{_STATELESS} tcp dport {RANDOM_PORTS[0]}-{RANDOM_PORTS[1]} drop"
    return Case(
        f"a filter in the network, at the port of node{number}: random ports dropped",
        lambda scene: tools.bridge_rules(scene, f'oifname "p{number}" {rule}'),
        wanted("port.ephemeral", at(number)),
    )


@kind("wire-pair", "holes", "breaks")
def wire_pair(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)
    rule = f"{_STATELESS} tcp dport {RANDOM_PORTS[0]}-{RANDOM_PORTS[1]} drop"

    def inject(scene: Scene) -> None:
        ways = ((one, other), (other, one))
        tools.bridge_rules(scene, *(f'iifname "p{a}" oifname "p{b}" {rule}' for a, b in ways))

    return Case(
        f"a filter in the network between node{one} and node{other}: random ports dropped",
        inject, wanted("port.ephemeral", between((one, other))),
    )  # fmt: skip


@kind("bundle-link", "holes", "sometimes")
def bundle_link(world: World, rng: random.Random) -> Case:
    """Draw a bundle of links towards a node of which one is dead: ports are hashed to links."""
    number, size = rng.choice(world.dialled), rng.choice((3, 4))
    seed = rng.randrange(1, 1 << 16)

    def inject(scene: Scene) -> None:
        head = "type filter hook ingress device eth0 priority 0; policy accept;"
        rule = f"tcp dport {RANDOM_PORTS[0]}-{RANDOM_PORTS[1]} jhash tcp sport . tcp dport"
        rule += f" mod {size} seed {seed:#x} 0 drop"
        scene.nft(number, f"table netdev early {{\nchain c {{\n{head}\n{rule}\n}}\n}}\n")

    return Case(
        f"one of {size} links towards node{number} is dead: connections by their hash", inject,
        wanted("port.ephemeral", at(number)),
    )  # fmt: skip


@kind("icmp-blocked", "holes", "works", remedy="none")
def icmp_blocked(world: World, rng: random.Random) -> Case:
    numbers = rng.choice((tuple(world.everywhere), (rng.choice(world.everywhere),)))

    def inject(scene: Scene) -> None:
        for number in numbers:
            rules = ("meta l4proto icmp drop",)
            tools.filter_table(scene, number, *rules)
            tools.filter_table(scene, number, *rules, hook="output", table="fwout")

    return Case(f"no ICMP in or out at {numbers}", inject, None)


@kind("udp-blocked", "holes", "works", remedy="none")
def udp_blocked(world: World, rng: random.Random) -> Case:
    numbers = rng.choice((tuple(world.everywhere), (rng.choice(world.everywhere),)))

    def inject(scene: Scene) -> None:
        for number in numbers:
            tools.filter_table(scene, number, "meta l4proto udp drop")

    return Case(f"no UDP into {numbers}", inject, None)


@kind("fragments-dropped", "holes", "works", remedy="none")
def fragments_dropped(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.everywhere)

    def inject(scene: Scene) -> None:
        head = "type filter hook ingress device eth0 priority 0; policy accept;"
        rule = "ip frag-off & 0x3fff != 0 drop"
        scene.nft(number, f"table netdev early {{\nchain c {{\n{head}\n{rule}\n}}\n}}\n")

    return Case(f"node{number} takes no fragments", inject, None)


@kind("isolated", "holes", "breaks", remedy="command")
def isolated(world: World, rng: random.Random) -> Case:
    number = rng.choice(list(world.everywhere)[1:])

    def inject(scene: Scene) -> None:
        tools.filter_table(scene, number, "meta l4proto { tcp, udp, icmp } drop")
        tools.filter_table(
            scene, number, "meta l4proto { tcp, udp, icmp } drop", hook="output", table="fwout"
        )

    return Case(
        f"node{number}: its firewall lets nothing in and nothing out", inject,
        wanted("port.ephemeral", at(number)), options=tools.SHARED,
    )  # fmt: skip
