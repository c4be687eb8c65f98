"""No way between nodes that are up: routes, translation, interfaces, neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import Case, Catalogue, World, at, between, wanted, warned
from tests.preflight.scene import Scene

KINDS = Catalogue()
kind = KINDS.add
_LOW_NET, _HIGH_NET = "10.2.7", "200.9.7"  # below and above every network of a draw
_STRICT = "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter"


def _not_master(world: World, rng: random.Random) -> int:
    return rng.choice(list(world.everywhere)[1:])


def _translated(world: World, number: int, net: str, is_inbound: bool) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        public = world.ip(number)
        own, _ = tools.route_away(scene, number, net)
        scene.lab.switch.run(f"ip addr add {public}/24 dev br0")
        inbound = f'iifname "br0" ip daddr {public} dnat to {own}\n' if is_inbound else ""
        rules = (
            "table ip nat {\nchain pre {\ntype nat hook prerouting priority -100;\n"
            f"{inbound}}}\nchain post {{\ntype nat hook postrouting priority 100;\n"
            f"ip saddr {own} snat to {public}\n}}\n}}\n"
        )
        scene.lab.switch.run(["nft", "-f", "-"], input=rules)
        tools.rename(scene, number, public if is_inbound else own, own=own)

    return inject


@kind("nat-one-to-one", "routes", "breaks")
def nat_one_to_one(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    return Case(
        f"node{number} is behind 1:1 NAT: it knows itself as {_LOW_NET}.2",
        _translated(world, number, _LOW_NET, is_inbound=True), wanted("net.nat", at(number)),
    )  # fmt: skip


@kind("nat-one-to-one-lucky", "routes", "works")
def nat_one_to_one_lucky(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    return Case(
        f"node{number} is behind 1:1 NAT as {_HIGH_NET}.2: it dials all others",
        _translated(world, number, _HIGH_NET, is_inbound=True),
        warned("net.nat", at(number)),
    )  # fmt: skip


@kind("nat-masquerade", "routes", "breaks")
def nat_masquerade(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    return Case(
        f"node{number} is behind a masquerade; no node reaches {_LOW_NET}.2",
        _translated(world, number, _LOW_NET, is_inbound=False), wanted("net.nat", at(number)),
    )  # fmt: skip


@kind("snat-local", "routes", "works", remedy="none")
def snat_local(world: World, rng: random.Random) -> Case:
    number, other = _not_master(world, rng), f"{world.net}.95"

    def inject(scene: Scene) -> None:
        scene.lab.run(number, f"ip addr add {other}/24 dev eth0")
        rules = "type nat hook postrouting priority 100;\n"
        rules += f"ip daddr {world.net}.0/24 snat to {other}"
        scene.nft(number, f"table ip nat {{\nchain post {{\n{rules}\n}}\n}}\n")

    return Case(
        f"what node{number} dials comes from its second address", inject,
        warned("net.nat net.route.sym", at(number), is_optional=True),
    )  # fmt: skip


@kind("endpoint-other-nic", "routes", "breaks")
def endpoint_other_nic(world: World, rng: random.Random) -> Case:
    def inject(scene: Scene) -> None:
        tools.second_nic(scene, 0, "eth1", "10.99.3.1/24")
        for number in world.everywhere:
            scene.say(number, master_addr="10.99.3.1", endpoint=f"10.99.3.1:{world.master_port}")

    return Case(
        "MASTER_ADDR is node0's address on a network that the others are not in", inject,
        wanted("net.route env.endpoint.local", at(0), at(*list(world.everywhere)[1:]),
               at(*world.everywhere)),
    )  # fmt: skip


@kind("gloo-other-nic", "routes", "breaks")
def gloo_other_nic(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)

    def inject(scene: Scene) -> None:
        tools.second_nic(scene, odd, "eth1", f"{_LOW_NET}.9/24")
        scene.lab.env[odd]["GLOO_SOCKET_IFNAME"] = "eth1"

    return Case(
        f"GLOO_SOCKET_IFNAME=eth1 on node{odd}, a network that the others are not in", inject,
        wanted("net.route", at(odd)), also=("env.drift",),
    )  # fmt: skip


@kind("gloo-other-nic-all", "routes", "breaks")
def gloo_other_nic_all(world: World, rng: random.Random) -> Case:
    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            tools.second_nic(scene, number, "eth1", f"10.3.{number}.9/24")
            scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "eth1"

    return Case(
        "GLOO_SOCKET_IFNAME=eth1 everywhere, each in a network of its own", inject,
        wanted("net.route", at(*world.everywhere)),
    )  # fmt: skip


@kind("own-name-other-nic", "routes", "breaks")
def own_name_other_nic(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)

    def inject(scene: Scene) -> None:
        tools.second_nic(scene, odd, "eth1", f"{_LOW_NET}.9/24")
        scene.lab.set_hosts(odd, {f"node{odd}": f"{_LOW_NET}.9 node{odd}"})

    return Case(
        f"node{odd}'s own name is its address on a network that the others are not in", inject,
        wanted("net.route", at(odd)),
    )  # fmt: skip


@kind("route-refused", "routes", "breaks", remedy="command")
def route_refused(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)
    word = rng.choice(("blackhole", "unreachable", "prohibit"))
    return Case(
        f"node{one} has a {word} route for node{other}",
        lambda scene: scene.lab.run(one, f"ip route add {word} {world.ip(other)}/32"),
        wanted("net.route", at(one), between((one, other))),
    )


@kind("route-wrong-gateway", "routes", "breaks", remedy="command")
def route_wrong_gateway(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)
    return Case(
        f"node{one} sends to node{other} by a gateway that is not there",
        lambda scene: scene.lab.run(
            one, f"ip route add {world.ip(other)}/32 via {world.nobody} dev eth0"
        ),
        wanted("net.route", at(one), between((one, other))),
    )


@kind("route-wrong-nic", "routes", "breaks", remedy="command")
def route_wrong_nic(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)

    def inject(scene: Scene) -> None:
        tools.second_nic(scene, one, "eth1", "10.99.3.1/24")
        scene.lab.run(one, f"ip route add {world.ip(other)}/32 dev eth1")

    return Case(
        f"node{one} sends to node{other} by eth1, where it is not", inject,
        wanted("net.route", at(one), between((one, other))),
    )  # fmt: skip


@kind("overlapping-nic", "routes", "breaks")
def overlapping_nic(world: World, rng: random.Random) -> Case:
    """Draw a container network that lies over a part of the nodes' own."""
    one = rng.choice(world.everywhere)
    others = [number for number in world.everywhere if number != one]

    def inject(scene: Scene) -> None:
        scene.add_nic(one, "docker1", f"{world.net}.126/25")

    return Case(
        f"node{one} has a bridge whose network contains the other nodes", inject,
        wanted("net.subnet net.route", at(one), between(*((one, other) for other in others))),
        options=tools.SHARED,
    )  # fmt: skip


@kind("policy-route", "routes", "breaks", remedy="command")
def policy_route(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)
    word = rng.choice(("blackhole default", f"default via {world.nobody} dev eth0"))

    def inject(scene: Scene) -> None:
        scene.lab.run(
            one, f"ip rule add to {world.ip(other)} lookup 100; ip route add {word} table 100"
        )

    return Case(
        f"node{one} has a rule that sends node{other}'s packets to a dead table", inject,
        wanted("net.route", at(one), between((one, other))),
    )  # fmt: skip


@kind("policy-source", "routes", "breaks", remedy="command")
def policy_source(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    word = rng.choice(("blackhole default", f"default via {world.nobody} dev eth0"))

    def inject(scene: Scene) -> None:
        scene.lab.run(
            number,
            f"ip rule add from {world.ip(number)} lookup 100; ip route add {word} table 100",
        )

    return Case(
        f"node{number} has a rule that sends what has its own address to a dead table", inject,
        wanted("net.route", at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("no-default-route", "routes", "breaks")
def no_default_route(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)

    def inject(scene: Scene) -> None:
        own, _ = tools.route_away(scene, number, _LOW_NET)
        tools.route_back(scene, [one for one in world.everywhere if one != number], _LOW_NET)
        tools.rename(scene, number, own)
        scene.lab.run(number, "ip route del default")

    return Case(
        f"node{number} is in another network and has no default route", inject,
        wanted("net.route", at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("no-way-back", "routes", "breaks")
def no_way_back(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    others = [one for one in world.everywhere if one != number]

    def inject(scene: Scene) -> None:
        own, _ = tools.route_away(scene, number, _LOW_NET)
        tools.rename(scene, number, own)

    return Case(
        f"node{number} is in another network, to which the others have no route", inject,
        wanted("net.route", at(number), at(*others), at(*world.everywhere)),
        options=tools.SHARED,
    )  # fmt: skip


@kind("hop-limit", "routes", "breaks")
def hop_limit(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)

    def inject(scene: Scene) -> None:
        own, _ = tools.route_away(scene, number, _LOW_NET)
        tools.route_back(scene, [one for one in world.everywhere if one != number], _LOW_NET)
        tools.rename(scene, number, own)
        scene.lab.run(number, "sysctl -qw net.ipv4.ip_default_ttl=1")

    return Case(
        f"node{number}, a router away, sends with a hop limit of 1", inject,
        wanted("net.route port.ephemeral", at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("other-segment", "routes", "breaks")
def other_segment(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)

    def inject(scene: Scene) -> None:
        scene.lab.switch.run(
            f"ip link add br7 type bridge; ip link set br7 up; ip link set p{number} master br7"
        )

    return Case(
        f"node{number}'s port of the switch is in another VLAN", inject,
        wanted("net.route port.ephemeral", at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("cable", "routes", "breaks")
def cable(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    return Case(
        f"node{number}'s interface has no carrier",
        lambda scene: scene.lab.switch.run(f"ip link set p{number} down"),
        wanted("net.down", at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("nic-down", "routes", "breaks", remedy="command")
def nic_down(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    return Case(
        f"node{number}'s interface is switched off",
        lambda scene: scene.lab.run(number, "ip link set eth0 down"),
        wanted("net.down", at(number)), options=tools.SHARED,
    )  # fmt: skip


@kind("loopback-down-master", "routes", "breaks", remedy="command")
def loopback_down_master(world: World, rng: random.Random) -> Case:
    return Case(
        "lo is down at node0", lambda scene: scene.lab.run(0, "ip link set lo down"),
        wanted("net.loopback", at(0)),
    )  # fmt: skip


@kind("loopback-down", "routes", "works", remedy="command")
def loopback_down(world: World, rng: random.Random) -> Case:
    number = _not_master(world, rng)
    return Case(
        f"lo is down at node{number}", lambda scene: scene.lab.run(number, "ip link set lo down"),
        wanted("net.loopback", at(number), statuses=("warn", "fail")),
    )  # fmt: skip


@kind("rp-filter", "routes", "breaks")
def rp_filter(world: World, rng: random.Random) -> Case:
    """Draw packets that come with an address to which the way back is another interface."""
    low, high = sorted(rng.sample(world.everywhere, 2), key=world.by_address.index)

    def inject(scene: Scene) -> None:
        for number in (low, high):
            tools.second_nic(scene, number, "eth1", f"10.88.0.{number + 1}/24", "br8")
        source = f"src 10.88.0.{high + 1}"
        scene.lab.run(high, f"ip route replace {world.ip(low)}/32 dev eth0 {source}")
        scene.lab.run(low, _STRICT)

    return Case(
        f"node{high} sends to node{low} with the address of its other network;"
        f" node{low} filters by the way back",
        inject, wanted("net.rp_filter", at(low), between((low, high))), also=("net.route.sym",),
    )  # fmt: skip


@kind("neighbour-wrong", "routes", "breaks")
def neighbour_wrong(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)

    def inject(scene: Scene) -> None:
        entry = f"{world.ip(other)} lladdr 02:de:ad:00:00:01 dev eth0 nud permanent"
        scene.lab.run(one, f"ip neigh replace {entry}")

    return Case(
        f"node{one} has a fixed neighbour entry for node{other} that is wrong", inject,
        wanted("net.route net.neigh", at(one), between((one, other))),
    )  # fmt: skip


@kind("arp-filtered", "routes", "breaks")
def arp_filtered(world: World, rng: random.Random) -> Case:
    one, other = rng.sample(world.everywhere, 2)

    def inject(scene: Scene) -> None:
        rules = "type filter hook input priority 0; policy accept;\n"
        rules += f"arp saddr ip {world.ip(other)} drop"
        scene.nft(one, f"table arp quiet {{\nchain c {{\n{rules}\n}}\n}}\n")

    return Case(
        f"node{one} hears no ARP of node{other}", inject,
        wanted("net.route net.neigh port.ephemeral", at(one), between((one, other))),
    )  # fmt: skip


@kind("address-twice", "routes", "breaks")
def address_twice(world: World, rng: random.Random) -> Case:
    one, other = sorted(rng.sample(list(world.everywhere), 2))

    def inject(scene: Scene) -> None:
        old, new = world.ip(other), world.ip(one)
        scene.lab.run(other, f"ip addr del {old}/24 dev eth0; ip addr add {new}/24 dev eth0")

    return Case(
        f"node{other} has the address of node{one}", inject,
        wanted("net.dup_ip", at(one, other)), options=tools.SHARED,
    )  # fmt: skip


@kind("mac-twice", "routes", "breaks")
def mac_twice(world: World, rng: random.Random) -> Case:
    one, other = sorted(rng.sample(world.everywhere, 2))

    def inject(scene: Scene) -> None:
        address = scene.lab.run(one, "cat /sys/class/net/eth0/address").stdout.strip()
        scene.lab.run(other, f"ip link set eth0 address {address}")

    return Case(
        f"node{one} and node{other} have one MAC address", inject,
        wanted("net.dup_ip net.dup_mac", at(one, other)), options=tools.SHARED,
    )  # fmt: skip
