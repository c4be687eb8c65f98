"""Healthy laboratories of many kinds: nothing may be said of any of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import Case, Catalogue, World
from tests.preflight.nslab import Wire
from tests.preflight.scene import Scene

KINDS = Catalogue()
_OVERLAY, _STORAGE = "10.244.7", "10.88.4"
_SERVICES = "172.16.255"


def _kind(
    name: str, says: str, *, wire: Wire = "veth", mtu: int = 1500, options: str = ""
) -> Callable[[Callable[[World, random.Random, Scene], None]], None]:
    """Add the decorated function, which changes a scene, as a healthy kind."""

    def take(change: Callable[[World, random.Random, Scene], None]) -> None:
        def draw(world: World, rng: random.Random) -> Case:
            seed = rng.randrange(1 << 31)
            return Case(
                says, lambda scene: change(world, random.Random(seed), scene), None,
                options=options, wire=wire, mtu=mtu,
            )  # fmt: skip

        needs = ("tun",) if wire == "tap" else ()
        KINDS.add(name, "healthy", "works", remedy="none", needs=needs)(draw)

    return take


def _everywhere(scene: Scene, command: str) -> None:
    for number in scene.everywhere:
        scene.lab.run(number, command)


def _endpoint(scene: Scene, number: int, host: str) -> None:
    scene.say(number, master_addr=host, endpoint=f"{host}:{scene.master_port}")


def _say_endpoint(scene: Scene, host: str) -> None:
    for number in scene.everywhere:
        _endpoint(scene, number, host)


def _name_all(scene: Scene, addresses: list[str]) -> None:
    lines = [f"{address} node{number}" for number, address in enumerate(addresses)]
    for number in scene.everywhere:
        tools.hosts_file(scene, number, *lines)


@_kind("plain", "three or four nodes on one switch")
def _plain(world: World, rng: random.Random, scene: Scene) -> None:
    pass


@_kind("plain-tap", "the same on a switch in user space", wire="tap")
def _plain_tap(world: World, rng: random.Random, scene: Scene) -> None:
    pass


@_kind("jumbo", "an MTU of 9000 everywhere", mtu=9000)
def _jumbo(world: World, rng: random.Random, scene: Scene) -> None:
    pass


@_kind("small-mtu", "an MTU of 1400 everywhere", mtu=1400)
def _small_mtu(world: World, rng: random.Random, scene: Scene) -> None:
    pass


@_kind("ipv6-only", "IPv6 and nothing else")
def _ipv6_only(world: World, rng: random.Random, scene: Scene) -> None:
    six = tools.dual_stack(scene, world, "fd00:77")
    for number in scene.everywhere:
        scene.lab.run(number, f"ip addr del {world.ip(number)}/24 dev eth0")
        lines = [f"{address} node{peer}" for peer, address in enumerate(six)]
        tools.hosts_file(scene, number, "::1 localhost", *lines)


@_kind("dual-stack", "IPv4 and IPv6 on all nodes, in either order")
def _dual_stack(world: World, rng: random.Random, scene: Scene) -> None:
    six = tools.dual_stack(scene, world, "fd00:77")
    four = [world.ip(number) for number in scene.everywhere]
    first, then = (six, four) if rng.random() < 0.5 else (four, six)
    lines = [f"{address} node{n}" for family in (first, then) for n, address in enumerate(family)]
    for number in scene.everywhere:
        tools.hosts_file(scene, number, *lines)


@_kind("ipv6-unnamed", "IPv6 on all nodes, to which no name leads")
def _ipv6_unnamed(world: World, rng: random.Random, scene: Scene) -> None:
    tools.dual_stack(scene, world, "fd00:77")


@_kind("ipv6-off", "IPv6 is switched off everywhere")
def _ipv6_off(world: World, rng: random.Random, scene: Scene) -> None:
    _everywhere(scene, "sysctl -qw net.ipv6.conf.all.disable_ipv6=1")


@_kind("storage-nic", "a second network for storage on all nodes")
def _storage_nic(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        address = f"{_STORAGE}.{world.tails[number]}/24"
        tools.second_nic(scene, number, "eth1", address, "br8")


@_kind("management-nic", "each node has a management network of its own")
def _management_nic(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        tools.second_nic(scene, number, "eth1", f"10.60.{number}.10/24")


@_kind("one-more-nic", "one node has a second NIC that the others lack")
def _one_more_nic(world: World, rng: random.Random, scene: Scene) -> None:
    tools.second_nic(scene, rng.choice(scene.everywhere), "eth1", f"{_STORAGE}.9/24")


@_kind("unused-nics", "NICs that are down, as servers have")
def _unused_nics(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        for index in range(1, 4):
            tools.second_nic(scene, number, f"eth{index}", f"10.61.{index}.{number + 1}/24")
            scene.lab.run(number, f"ip addr flush dev eth{index}; ip link set eth{index} down")


@_kind("chosen-nic", "GLOO_SOCKET_IFNAME names a second network, which all share")
def _chosen_nic(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        address = f"{_STORAGE}.{world.tails[number]}/24"
        tools.second_nic(scene, number, "eth1", address, "br8")
        scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "eth1"


@_kind("docker", "docker0, cni0 and virbr0 with one address on all nodes")
def _docker(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        for name, address in (
            ("docker0", "172.17.0.1/16"), ("cni0", "10.244.0.1/24"), ("virbr0", "192.168.122.1/24"),
            ("br-1f2e3d4c5b6a", "172.18.0.1/16"),
        ):  # fmt: skip
            scene.add_nic(number, name, address)


@_kind("docker-firewall", "the rules that a container runtime leaves")
def _docker_firewall(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.add_nic(number, "docker0", "172.17.0.1/16")
        scene.nft(
            number,
            "table ip nat {\nchain post {\ntype nat hook postrouting priority 100;\n"
            'ip saddr 172.17.0.0/16 oifname != "docker0" masquerade\n}\n}\n'
            "table ip filter {\nchain forward {\n"
            "type filter hook forward priority 0; policy drop;\n}\n}\n",
        )


@_kind("host-bridge", "eth0 is a port of a bridge that has the address, as on a host of VMs")
def _host_bridge(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        address = world.ip(number)
        scene.lab.run(
            number,
            "ip link add br0 type bridge; mac=$(cat /sys/class/net/eth0/address);"
            f" ip link set br0 address $mac up; ip addr del {address}/24 dev eth0;"
            f" ip link set eth0 master br0; ip addr add {address}/24 dev br0",
        )


@_kind("overlay", "a VXLAN beside the network, for containers")
def _overlay(world: World, rng: random.Random, scene: Scene) -> None:
    _vxlan(world, scene, "flannel.1")


@_kind("overlay-job", "the job runs on a VXLAN: its names and its NIC")
def _overlay_job(world: World, rng: random.Random, scene: Scene) -> None:
    _vxlan(world, scene, "vx0")
    for number in scene.everywhere:
        scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "vx0"
    _name_all(scene, [f"{_OVERLAY}.{tail}" for tail in world.tails])


def _vxlan(world: World, scene: Scene, name: str) -> None:
    for number in scene.everywhere:
        flood = "; ".join(
            f"bridge fdb append 00:00:00:00:00:00 dev {name} dst {world.ip(peer)}"
            for peer in scene.everywhere
            if peer != number
        )
        scene.lab.run(
            number,
            f"ip link add {name} type vxlan id 7 dstport 4789 local {world.ip(number)} dev eth0;"
            f" ip addr add {_OVERLAY}.{world.tails[number]}/24 dev {name};"
            f" ip link set {name} mtu 1450 up; {flood}",
        )


@_kind("vlan", "the job's network is a second interface on the same cable")
def _vlan(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        address = world.ip(number)
        scene.lab.run(
            number,
            "ip link add link eth0 name eth0.100 type macvlan mode bridge;"
            f" ip addr del {address}/24 dev eth0; ip addr add {address}/24 dev eth0.100;"
            " ip link set eth0.100 up",
        )


@_kind("vpn", "a tunnel with one address, as a VPN client has")
def _vpn(world: World, rng: random.Random, scene: Scene) -> None:
    numbers = rng.sample(scene.everywhere, rng.randrange(1, world.num_hosts + 1))
    for number in numbers:
        scene.lab.run(
            number, "ip tuntap add tailscale0 mode tun 2>/dev/null"
            " || ip link add tailscale0 type macvlan mode private link eth0 2>/dev/null"
            " || ip link add link eth0 name tailscale0 type macvlan mode private;"
            f" ip addr add 100.64.0.{world.tails[number]}/32 dev tailscale0;"
            " ip link set tailscale0 mtu 1280 up",
        )  # fmt: skip


@_kind("full-names", "host names with a domain; short names and long ones lead to the address")
def _full_names(world: World, rng: random.Random, scene: Scene) -> None:
    is_long = rng.random() < 0.5
    domain = rng.choice(("cluster.example.org", "local", "eu-west-1.compute.internal"))
    lines = [f"{world.ip(n)} node{n}.{domain} node{n}" for n in scene.everywhere]
    for number in scene.everywhere:
        tools.hosts_file(scene, number, *lines)
        scene.lab.run(number, f"hostname node{number}.{domain}")
        scene.lab.write_etc(number, "hostname", f"node{number}.{domain}\n")
        if is_long:
            scene.nodes[number] = ",".join(f"{name}.{domain}" for name in world.names)
            _endpoint(scene, number, f"node0.{domain}")


@_kind("other-host-names", "host names that are not the nodes' names")
def _other_host_names(world: World, rng: random.Random, scene: Scene) -> None:
    own = [f"gpu-{rng.choice('abcd')}{10 + number}" for number in scene.everywhere]
    lines = [f"{world.ip(n)} node{n} {own[n]}" for n in scene.everywhere]
    for number in scene.everywhere:
        tools.hosts_file(scene, number, *lines)
        scene.lab.run(number, f"hostname {own[number]}")
        scene.lab.write_etc(number, "hostname", f"{own[number]}\n")


@_kind("addresses-only", "nodes and endpoint are addresses; only the own name is known")
def _addresses_only(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        tools.hosts_file(scene, number, f"{world.ip(number)} node{number}")
        scene.nodes[number] = ",".join(map(world.ip, scene.everywhere))
    _say_endpoint(scene, world.ip(0))


@_kind("no-names", "nodes and endpoint are addresses, no name is known, the NIC is named")
def _no_names(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        tools.hosts_file(scene, number)
        scene.nodes[number] = ",".join(map(world.ip, scene.everywhere))
        scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "eth0"
    _say_endpoint(scene, world.ip(0))


@_kind("written-hosts", "a hosts file with tabs, comments, aliases and lines of others")
def _written_hosts(world: World, rng: random.Random, scene: Scene) -> None:
    lines = ["# written by hand", "", "::1\tlocalhost ip6-localhost", "10.9.9.9\tstorage # nfs"]
    lines += [f"{world.ip(n)}\t\tnode{n}   n{n}\t# rack {n}" for n in scene.everywhere]
    for number in scene.everywhere:
        tools.hosts_file(scene, number, *lines)


@_kind("nodes-range", "--nodes is written as a range")
def _nodes_range(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.nodes[number] = f"node[0-{world.num_hosts - 1}]"


@_kind("open-subnet", "a default-deny firewall that is open for the subnet")
def _open_subnet(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.firewall(
            number, "ct state established,related accept", f"ip saddr {world.net}.0/24 accept",
            "tcp dport 22 accept", policy="drop",
        )  # fmt: skip


@_kind("open-tcp", "a default-deny firewall, open for TCP above 1023 from the subnet")
def _open_tcp(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.firewall(
            number, "ct state established,related accept", "icmp type echo-request accept",
            f"ip saddr {world.net}.0/24 tcp dport 1024-65535 accept", policy="drop",
        )  # fmt: skip


@_kind("open-both-ways", "default-deny in and out, open for the subnet")
def _open_both_ways(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.nft(
            number,
            "table inet fw {\n"
            "chain in {\ntype filter hook input priority 0; policy drop;\niif lo accept\n"
            f"ct state established,related accept\nip saddr {world.net}.0/24 accept\n}}\n"
            "chain out {\ntype filter hook output priority 0; policy drop;\noif lo accept\n"
            f"ct state established,related accept\nip daddr {world.net}.0/24 accept\n}}\n}}\n",
        )


@_kind("far-apart", "40 ms round trip between all nodes", wire="tap")
def _far_apart(world: World, rng: random.Random, scene: Scene) -> None:
    for start in scene.everywhere:
        for end in scene.everywhere:
            if start != end:
                scene.lab.link(start, end).delay = 0.02


@_kind("slow-cpu", "one node computes something else on all its processors")
def _slow_cpu(world: World, rng: random.Random, scene: Scene) -> None:
    number = rng.choice(scene.everywhere)
    for _ in range(2):
        scene.lab.popen(number, "nice -n 5 sh -c 'while :; do :; done'")


@_kind("more-addresses", "secondary addresses on the NIC of every node")
def _more_addresses(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        more = 100 + world.tails[number]
        scene.lab.run(number, f"ip addr add {world.net}.{more}/24 dev eth0")


@_kind("service-addresses", "an address of its own on lo, as where hosts speak BGP")
def _service_addresses(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.lab.run(number, f"ip addr add {_SERVICES}.{number + 1}/32 dev lo")


@_kind("virtual-master", "MASTER_ADDR is a virtual address that node0 holds")
def _virtual_master(world: World, rng: random.Random, scene: Scene) -> None:
    scene.lab.run(0, f"ip addr add {world.net}.200/24 dev eth0")
    _say_endpoint(scene, f"{world.net}.200")


@_kind("named-master", "MASTER_ADDR is an alias of node0")
def _named_master(world: World, rng: random.Random, scene: Scene) -> None:
    name = rng.choice(("master", "head.cluster.example.org"))
    _everywhere(scene, f"echo '{world.ip(0)} {name}' >> /etc/hosts")
    _say_endpoint(scene, name)


@_kind("master-two-ways", "MASTER_ADDR is a name on one node, its address on the others")
def _master_two_ways(world: World, rng: random.Random, scene: Scene) -> None:
    _say_endpoint(scene, world.ip(0))
    _endpoint(scene, rng.choice(scene.everywhere), "node0")


@_kind("master-is-address", "MASTER_ADDR is node0's address")
def _master_is_address(world: World, rng: random.Random, scene: Scene) -> None:
    _say_endpoint(scene, world.ip(0))


@_kind("two-networks", "one node is a router away, with the right routes")
def _two_networks(world: World, rng: random.Random, scene: Scene) -> None:
    number = rng.choice(list(scene.everywhere)[1:])
    net = rng.choice(("10.2.7", "200.9.7"))
    own, _ = tools.route_away(scene, number, net)
    tools.route_back(scene, [one for one in scene.everywhere if one != number], net)
    tools.rename(scene, number, own)


@_kind("policy-routes", "rules and tables of routes that all lead to the right place")
def _policy_routes(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.lab.run(
            number, f"ip rule add from {world.ip(number)} lookup 100;"
            f" ip route add {world.net}.0/24 dev eth0 table 100",
        )  # fmt: skip


@_kind("strict-filter", "rp_filter is strict everywhere, and no way back differs")
def _strict_filter(world: World, rng: random.Random, scene: Scene) -> None:
    _everywhere(scene, "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter")


@_kind("other-range", "another range of random ports on all nodes")
def _other_range(world: World, rng: random.Random, scene: Scene) -> None:
    low, high = rng.choice(((20000, 28000), (40000, 65000), (50000, 60999)))
    _everywhere(scene, f"sysctl -qw net.ipv4.ip_local_port_range='{low} {high}'")


@_kind("other-tcp", "one node without TCP timestamps and selective acknowledgements")
def _other_tcp(world: World, rng: random.Random, scene: Scene) -> None:
    scene.lab.run(
        rng.choice(scene.everywhere), "sysctl -qw net.ipv4.tcp_timestamps=0 net.ipv4.tcp_sack=0"
    )


@_kind("hop-limit-one", "a hop limit of 1, which is enough on one switch")
def _hop_limit_one(world: World, rng: random.Random, scene: Scene) -> None:
    scene.lab.run(rng.choice(scene.everywhere), "sysctl -qw net.ipv4.ip_default_ttl=1")


@_kind("named-nic", "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name eth0 everywhere")
def _named_nic(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.lab.env[number].update(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="=eth0")


@_kind("several-ranks", "several ranks on each node")
def _several_ranks(world: World, rng: random.Random, scene: Scene) -> None:
    nproc = rng.choice((2, 4))
    for number in scene.everywhere:
        own = scene.lab.env[number]
        if scene.mode == "env":
            own.update(
                RANK=str(number * nproc), WORLD_SIZE=str(world.num_hosts * nproc),
                LOCAL_WORLD_SIZE=str(nproc),
            )  # fmt: skip
        else:
            own["PET_NPROC_PER_NODE"] = str(nproc)


@_kind("ranks-any-order", "node ranks in another order than --nodes; rank 0 is on the master")
def _ranks_any_order(world: World, rng: random.Random, scene: Scene) -> None:
    order = list(scene.everywhere)[1:]
    rng.shuffle(order)
    for number, rank in zip(list(scene.everywhere)[1:], order, strict=True):
        scene.say(number, node_rank=rank)


@_kind("busy-machine", "services listen and connections stand on every node")
def _busy_machine(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        for port in (22, 9090, 9100, 10250):
            tools.middle(scene, number, port, "hang")


@_kind("search-domain", "resolv.conf with a search domain and no server that answers")
def _search_domain(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        text = "search cluster.example.org example.org\noptions timeout:1 attempts:1\n"
        scene.lab.write_etc(number, "resolv.conf", text)


@_kind("upper-case", "host names in capitals, node names in small letters")
def _upper_case(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        scene.lab.run(number, f"hostname NODE{number}")
        scene.lab.write_etc(number, "hostname", f"NODE{number}\n")


@_kind("two-own-addresses", "every name leads to two addresses, both of that node")
def _two_own_addresses(world: World, rng: random.Random, scene: Scene) -> None:
    for number in scene.everywhere:
        more = f"{_STORAGE}.{world.tails[number]}"
        tools.second_nic(scene, number, "eth1", f"{more}/24", "br8")
    lines = [f"{world.ip(n)} node{n}" for n in scene.everywhere]
    lines += [f"{_STORAGE}.{world.tails[n]} node{n}" for n in scene.everywhere]
    for number in scene.everywhere:
        tools.hosts_file(scene, number, *lines)
