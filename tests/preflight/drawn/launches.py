"""Launches in which the nodes, their ranks and the endpoint do not fit together."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import Case, Catalogue, World, at, wanted, warned
from tests.preflight.injections import hosts_entry
from tests.preflight.scene import Scene

KINDS = Catalogue()
kind = KINDS.add


def _other(world: World, rng: random.Random, *without: int) -> int:
    return rng.choice([number for number in world.everywhere if number not in without])


def _ranks(order: list[int]) -> Callable[[Scene], None]:
    """Tell node number i that it is node `order[i]`."""

    def inject(scene: Scene) -> None:
        for number, rank in enumerate(order):
            scene.say(number, node_rank=rank)

    return inject


def _endpoint(scene: Scene, number: int, host: str) -> None:
    scene.say(number, master_addr=host, endpoint=f"{host}:{scene.master_port}")


@kind("rank0-swapped", "launch", "breaks")
def rank0_swapped(world: World, rng: random.Random) -> Case:
    number = _other(world, rng, 0)
    order = list(world.everywhere)
    order[0], order[number] = number, 0
    return Case(
        f"node ranks of node0 and node{number} swapped; MASTER_ADDR is node0", _ranks(order),
        wanted("env.master.rank0", at(number), at(0, number)),
    )  # fmt: skip


@kind("ranks-rotated", "launch", "breaks")
def ranks_rotated(world: World, rng: random.Random) -> Case:
    shift = rng.randrange(1, world.num_hosts)
    order = [(number + shift) % world.num_hosts for number in world.everywhere]
    first = order.index(0)
    return Case(
        f"node ranks rotated by {shift}; MASTER_ADDR is node0", _ranks(order),
        wanted("env.master.rank0", at(first), at(0, first), at(*world.everywhere)),
    )  # fmt: skip


@kind("ranks-other-order", "launch", "works", remedy="none")
def ranks_other_order(world: World, rng: random.Random) -> Case:
    order = [0, *rng.sample(list(world.everywhere)[1:], world.num_hosts - 1)]
    order = order if order != sorted(order) else [0, *order[:0:-1]]
    return Case(f"node ranks {order} in the order of --nodes; rank 0 is right", _ranks(order), None)


@kind("master-elsewhere", "launch", "breaks")
def master_elsewhere(world: World, rng: random.Random) -> Case:
    number = _other(world, rng, 0)
    host = rng.choice((f"node{number}", world.ip(number)))

    def inject(scene: Scene) -> None:
        for one in world.everywhere:
            _endpoint(scene, one, host)

    return Case(
        f"MASTER_ADDR is {host} (node{number}) everywhere; rank 0 is on node0", inject,
        wanted("env.master.rank0", at(0), at(0, number)),
    )  # fmt: skip


@kind("master-differs", "launch", "breaks")
def master_differs(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)
    number = _other(world, rng, 0)
    host = rng.choice((f"node{number}", world.ip(number)))
    return Case(
        f"MASTER_ADDR is {host} on node{odd}, node0 on the others",
        lambda scene: _endpoint(scene, odd, host), wanted("env.agree", at(odd)),
    )  # fmt: skip


@kind("master-dead", "launch", "breaks")
def master_dead(world: World, rng: random.Random) -> Case:
    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            _endpoint(scene, number, world.nobody)

    return Case(
        f"MASTER_ADDR is {world.nobody} everywhere, which no node has", inject,
        wanted("env.master.rank0 env.endpoint.local", at(0), at(*world.everywhere)),
    )  # fmt: skip


@kind("master-localhost-one", "launch", "breaks")
def master_localhost_one(world: World, rng: random.Random) -> Case:
    odd, host = _other(world, rng, 0), rng.choice(("localhost", "127.0.0.1"))
    return Case(
        f"MASTER_ADDR is {host} on node{odd}", lambda scene: _endpoint(scene, odd, host),
        wanted("env.agree env.endpoint.local", at(odd)),
    )  # fmt: skip


@kind("master-localhost-all", "launch", "breaks")
def master_localhost_all(world: World, rng: random.Random) -> Case:
    host = rng.choice(("localhost", "127.0.0.1", "127.0.0.53"))

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            _endpoint(scene, number, host)

    return Case(
        f"MASTER_ADDR is {host} everywhere", inject,
        wanted("env.endpoint.local", at(*world.everywhere)),
    )  # fmt: skip


@kind("master-docker0", "launch", "breaks")
def master_docker0(world: World, rng: random.Random) -> Case:
    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            scene.add_nic(number, "docker0", "172.17.0.1/16")
            _endpoint(scene, number, "172.17.0.1")

    return Case(
        "MASTER_ADDR is docker0's address, the same on each node", inject,
        wanted("env.endpoint.local", at(0), at(*world.everywhere)),
    )  # fmt: skip


@kind("port-differs", "launch", "breaks")
def port_differs(world: World, rng: random.Random) -> Case:
    odd, port = _other(world, rng, 0), world.master_port + rng.randrange(1, 40)
    return Case(
        f"MASTER_PORT is {port} on node{odd}",
        lambda scene: scene.say(odd, master_port=port), wanted("env.agree", at(odd)),
    )  # fmt: skip


@kind("nodes-order", "launch", "works", remedy="command")
def nodes_order(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)
    names = list(world.names)
    shuffled = names[::-1] if rng.random() < 0.5 else [*names[1:], names[0]]

    def inject(scene: Scene) -> None:
        scene.nodes[odd] = ",".join(shuffled)

    return Case(
        f"--nodes is {','.join(shuffled)} on node{odd}", inject,
        wanted("env.nodes", at(odd), statuses=("fail", "warn")),
    )  # fmt: skip


@kind("nodes-shorter", "launch", "works", remedy="command")
def nodes_shorter(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)
    gone = _other(world, rng, odd, 0)
    names = [name for name in world.names if name != f"node{gone}"]

    def inject(scene: Scene) -> None:
        scene.nodes[odd] = ",".join(names)

    return Case(
        f"--nodes on node{odd} lacks node{gone}", inject,
        wanted("env.nodes", at(odd), statuses=("fail", "warn")),
    )  # fmt: skip


@kind("nodes-longer", "launch", "works", remedy="command")
def nodes_longer(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)

    def inject(scene: Scene) -> None:
        scene.nodes[odd] = ",".join((*world.names, "node9"))

    return Case(
        f"--nodes on node{odd} has one more, node9", inject,
        wanted("env.nodes", at(odd), statuses=("fail", "warn")), options="--wait 8",
    )  # fmt: skip


@kind("nodes-blanks", "launch", "works", remedy="none")
def nodes_blanks(world: World, rng: random.Random) -> Case:
    joint = rng.choice((", ", " ,", " , ", ",\t"))
    numbers = rng.choice((tuple(world.everywhere), (rng.choice(world.everywhere),)))

    def inject(scene: Scene) -> None:
        for number in numbers:
            scene.nodes[number] = joint.join(world.names)

    return Case(f"--nodes is written with {joint!r} on {numbers}", inject, None)


@kind("world-size-one", "launch", "breaks")
def world_size_one(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)
    size = world.num_hosts + rng.choice((-1, 1))
    return Case(
        f"world size {size} on node{odd}, {world.num_hosts} on the others",
        lambda scene: scene.say(odd, num_nodes=size),
        wanted("env.agree env.complete", at(odd)),
    )


@kind("world-size-all", "launch", "breaks")
def world_size_all(world: World, rng: random.Random) -> Case:
    size = world.num_hosts + rng.choice((1, 2))

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            scene.say(number, num_nodes=size)

    return Case(
        f"world size {size} everywhere on {world.num_hosts} nodes", inject,
        wanted("env.agree env.complete env.rank.unique env.nodes"),
    )  # fmt: skip


@kind("rank-twice", "launch", "breaks")
def rank_twice(world: World, rng: random.Random) -> Case:
    one, other = sorted(rng.sample(world.everywhere, 2))
    return Case(
        f"node{other} gets node rank {one} as well",
        lambda scene: scene.say(other, node_rank=one),
        wanted("env.rank.unique", at(one, other), at(other)),
    )


@kind("ranks-from-one", "launch", "breaks")
def ranks_from_one(world: World, rng: random.Random) -> Case:
    return Case(
        "node ranks are counted from 1", _ranks([number + 1 for number in world.everywhere]),
        wanted("env.rank.unique env.complete"),
    )  # fmt: skip


@kind("rank-unset", "launch", "breaks", mode="env")
def rank_unset(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)
    name = rng.choice(("RANK", "WORLD_SIZE"))

    def inject(scene: Scene) -> None:
        del scene.lab.env[odd][name]

    return Case(f"{name} is not set on node{odd}", inject, wanted("env.complete", at(odd)))


@kind("rank-no-number", "launch", "breaks", mode="env")
def rank_no_number(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)
    name, value = rng.choice((("RANK", "one"), ("RANK", "$NODE_RANK"), ("WORLD_SIZE", "3.0")))

    def inject(scene: Scene) -> None:
        scene.lab.env[odd][name] = value

    return Case(f"{name} is {value!r} on node{odd}", inject, wanted("env.complete", at(odd)))


@kind("master-name-moved", "launch", "breaks")
def master_name_moved(world: World, rng: random.Random) -> Case:
    """Draw a name of the endpoint that leads to another node, the same for all."""
    number = _other(world, rng, 0)

    def inject(scene: Scene) -> None:
        for one in world.everywhere:
            line = f"{world.ip(number)} master.cluster.local"
            scene.lab.run(one, f"echo '{line}' >> /etc/hosts")
            _endpoint(scene, one, "master.cluster.local")

    return Case(
        f"MASTER_ADDR is a name that leads to node{number} everywhere; rank 0 is on node0",
        inject, wanted("env.master.rank0", at(0), at(0, number)),
    )  # fmt: skip


@kind("gloo-loopback", "launch", "breaks")
def gloo_loopback(world: World, rng: random.Random) -> Case:
    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "lo"

    return Case(
        "GLOO_SOCKET_IFNAME=lo everywhere", inject,
        wanted("net.iface.gloo", at(*world.everywhere)),
    )  # fmt: skip


@kind("gloo-nic-missing", "launch", "breaks")
def gloo_nic_missing(world: World, rng: random.Random) -> Case:
    odd, name = rng.choice(world.everywhere), rng.choice(("ens5", "eth1", "^lo", "ib0"))

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = name if number == odd else "eth0"

    return Case(
        f"GLOO_SOCKET_IFNAME={name} on node{odd}, eth0 on the others", inject,
        wanted("net.iface.missing", at(odd)), also=("env.drift",),
    )  # fmt: skip


@kind("not-started", "launch", "breaks", remedy="command")
def not_started(world: World, rng: random.Random) -> Case:
    number = _other(world, rng, 0)
    return Case(
        f"nothing is started on node{number}", lambda scene: scene.missing.add(number),
        wanted("node.absent", at(number)), options="--wait 6",
    )  # fmt: skip


# ---- names


@kind("hosts-dead", "names", "breaks")
def hosts_dead(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)
    return Case(
        f"on node{odd} the name node0 is {world.nobody}, which no node has",
        hosts_entry(odd, "node0", f"{world.nobody} node0"), wanted("dns.wrong", at(odd)),
    )  # fmt: skip


@kind("hosts-stale", "names", "breaks")
def hosts_stale(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)
    number = _other(world, rng, 0, odd)
    return Case(
        f"on node{odd} the name node0 is the address of node{number}",
        hosts_entry(odd, "node0", f"{world.ip(number)} node0"), wanted("dns.wrong", at(odd)),
    )  # fmt: skip


@kind("hosts-loopback", "names", "breaks")
def hosts_loopback(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)
    return Case(
        f"on node{odd} the name node0 is 127.0.0.1",
        hosts_entry(odd, "node0", "127.0.0.1 node0"), wanted("dns.loopback", at(odd)),
    )  # fmt: skip


@kind("hosts-missing", "names", "breaks", remedy="command")
def hosts_missing(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)
    return Case(
        f"node{odd} cannot resolve node0", hosts_entry(odd, "node0", ""),
        wanted("dns.master", at(odd)),
    )  # fmt: skip


@kind("peer-unknown", "names", "works", remedy="none")
def peer_unknown(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)
    number = _other(world, rng, 0, odd)
    return Case(
        f"node{odd} cannot resolve node{number}, which the job never asks for",
        hosts_entry(odd, f"node{number}", ""), None,
    )  # fmt: skip


@kind("own-loopback", "names", "breaks", remedy="command")
def own_loopback(world: World, rng: random.Random) -> Case:
    address = rng.choice(("127.0.1.1", "127.0.0.1"))

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            name = world.names[number]
            scene.lab.set_hosts(number, {name: f"{address} {name}"})

    return Case(
        f"the own name is {address} everywhere", inject,
        wanted("dns.self.loopback", at(*world.everywhere)),
    )  # fmt: skip


@kind("own-stale", "names", "breaks", remedy="command", net="192.168.77")
def own_stale(world: World, rng: random.Random) -> Case:
    """Draw a node that was cloned: its own name still has the address it had before.

    gloo takes 127.0.0.1 then, which is dialled where the others' addresses are higher.
    """
    odd = rng.choice(world.everywhere)
    name = f"node{odd}"
    return Case(
        f"node{odd}'s own name is {world.nobody}, which it has no more",
        hosts_entry(odd, name, f"{world.nobody} {name}"),
        wanted("dns.self.loopback dns.wrong", at(odd)),
    )


@kind("all-localhost", "names", "breaks")
def all_localhost(world: World, rng: random.Random) -> Case:
    name = rng.choice(("localhost", "localhost.localdomain"))

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            scene.lab.run(number, f"hostname {name}")
            scene.lab.write_etc(number, "hostname", f"{name}\n")
            scene.lab.run(number, f"echo '127.0.0.1 {name}' >> /etc/hosts")

    return Case(
        f"all nodes are called {name}", inject, wanted("host.dup", at(*world.everywhere))
    )  # fmt: skip


@kind("all-one-name", "names", "works")
def all_one_name(world: World, rng: random.Random) -> Case:
    name = rng.choice(("worker", "ubuntu", "ip-10-0-0-1"))

    def inject(scene: Scene) -> None:
        for number in world.everywhere:
            scene.lab.run(
                number, f"hostname {name}; echo '{world.ip(number)} {name}' >> /etc/hosts"
            )
            scene.lab.write_etc(number, "hostname", f"{name}\n")

    return Case(
        f"all nodes are called {name}; each resolves it to itself", inject,
        warned("host.dup", at(*world.everywhere)),
    )  # fmt: skip


@kind("two-one-name", "names", "works")
def two_one_name(world: World, rng: random.Random) -> Case:
    numbers = tuple(sorted(rng.sample(world.everywhere, 2)))

    def inject(scene: Scene) -> None:
        for number in numbers:
            scene.lab.run(number, f"hostname clone; echo '{world.ip(number)} clone' >> /etc/hosts")
            scene.lab.write_etc(number, "hostname", "clone\n")

    return Case(
        f"nodes {numbers} are both called clone", inject, warned("host.dup", at(*numbers))
    )  # fmt: skip


@kind("ipv6-first-one-lacks", "names", "breaks")
def ipv6_first_one_lacks(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)

    def inject(scene: Scene) -> None:
        six = tools.dual_stack(scene, world)
        scene.lab.run(odd, "sysctl -qw net.ipv6.conf.all.disable_ipv6=1")
        for number in world.everywhere:
            lines = [f"{six[one]} node{one}" for one in world.everywhere]
            lines += [f"{world.ip(one)} node{one}" for one in world.everywhere]
            tools.hosts_file(scene, number, *lines)

    return Case(
        f"all names lead to IPv6 first; node{odd} has none", inject,
        wanted("dns.family", at(odd)),
    )  # fmt: skip


@kind("ipv6-own-name", "names", "breaks")
def ipv6_own_name(world: World, rng: random.Random) -> Case:
    odd = rng.choice(world.everywhere)

    def inject(scene: Scene) -> None:
        six = tools.dual_stack(scene, world)
        scene.lab.set_hosts(odd, {f"node{odd}": f"{six[odd]} node{odd}"})

    return Case(
        f"node{odd}'s own name is IPv6 only; the others' are IPv4", inject,
        wanted("dns.family", at(odd)),
    )  # fmt: skip


@kind("ipv6-dead-first", "names", "works")
def ipv6_dead_first(world: World, rng: random.Random) -> Case:
    odd = _other(world, rng, 0)

    def inject(scene: Scene) -> None:
        tools.dual_stack(scene, world)
        scene.lab.set_hosts(odd, {"node0": f"fd77::99 node0\n{world.ip(0)} node0"})

    return Case(
        f"on node{odd} a dead IPv6 address of node0 comes first", inject,
        warned("dns.family", at(odd)),
    )  # fmt: skip
