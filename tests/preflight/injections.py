"""What is broken in the laboratory: one function a fault."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.preflight.scene import MASTER_PORT, Scene

Injection = Callable[[Scene], object]
EPHEMERAL = "32768-60999"  # Linux's default of ip_local_port_range
_ESTABLISHED = "ct state established,related accept"
_DEAD_ADDRESS = 99  # nobody on the wire has it
_SEGMENTS_OFF = "tso off gso off gro off tx off"  # a super-packet vanishes whole, a frame alone


def nothing(scene: Scene) -> None:
    """Leave the laboratory healthy."""


# ---- firewalls


def firewall(number: int, *rules: str) -> Injection:
    """Put `rules` on what comes in at one host."""
    return lambda scene: scene.firewall(number, *rules)


def only_master_open(verdict: str) -> Injection:
    """Open MASTER_PORT and nothing else, on every host."""

    def inject(scene: Scene) -> None:
        for number in scene.everywhere:
            scene.firewall(number, _ESTABLISHED, f"tcp dport {MASTER_PORT} accept", verdict)

    return inject


def one_way(start: int, end: int) -> Injection:
    """Drop what `start` begins towards `end`; what `end` begins passes."""
    return lambda scene: scene.firewall(end, f"ip saddr {scene.lab.ip(start)} ct state new drop")


def isolated(*numbers: int) -> Injection:
    """Let nothing in or out."""

    def inject(scene: Scene) -> None:
        for number in numbers:
            scene.nft(
                number,
                "table inet fw {\n"
                "chain in {\ntype filter hook input priority 0; policy drop;\niif lo accept\n}\n"
                "chain out {\ntype filter hook output priority 0; policy accept;\n"
                "oif lo accept\nmeta l4proto { tcp, udp, icmp } drop\n}\n}\n",
            )

    return inject


def no_data(number: int, ports: str, verdict: str) -> Injection:
    """Let handshakes to one host's ports pass and drop or reset what callers then send."""
    match = f"tcp dport {ports} ct direction original ct state established meta length > 60"
    return firewall(number, f"{match} {verdict}")


def hole(number: int, first: int, last: int, source: int | None = None) -> Injection:
    """Drop new connections to some of one host's ports, of all or of one caller."""

    def inject(scene: Scene) -> None:
        origin = f"ip saddr {scene.lab.ip(source)} " if source is not None else ""
        scene.firewall(number, f"{origin}tcp dport {first}-{last} ct state new drop")

    return inject


_SIDECAR = """
import socket, sys, threading
def serve(call):
    if sys.argv[1] == "http":
        call.recv(4096)
        call.sendall(b"HTTP/1.1 400 Bad Request\\r\\nserver: envoy\\r\\n\\r\\n")
        call.close()
    else:
        while call.recv(65536):
            pass
listener = socket.create_server(("", 15001), backlog=512)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def sidecar(number: int, manner: str, ports: str = EPHEMERAL) -> Injection:
    """Send one host's outgoing connections to a proxy beside it, which says HTTP, or nothing."""

    def inject(scene: Scene) -> None:
        scene.lab.popen(
            number, [sys.executable, "-c", _SIDECAR, manner], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _wait_for_listener(scene, number, 15001)
        scene.nft(
            number,
            "table ip mesh {\nchain out {\ntype nat hook output priority -100; policy accept;\n"
            f"oif lo accept\ntcp dport {ports} redirect to :15001\n}}\n}}\n",
        )

    return inject


_HOLDS_PORTS = """
import socket, sys, time
first, last = map(int, sys.argv[1:])
kept = [socket.create_server(("", port)) for port in range(first, last + 1)]
time.sleep(100000)
"""


def local_ports_used(number: int, first: int, last: int) -> Injection:
    """Let a host hand out these local ports, and another program hold all of them."""

    def inject(scene: Scene) -> None:
        scene.lab.run(number, f"echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range")
        scene.lab.popen(number, [sys.executable, "-c", _HOLDS_PORTS, str(first), str(last)])
        _wait_for_listener(scene, number, last)

    return inject


# ---- names and addresses


def hosts_entry(number: int, name: str, line: str) -> Injection:
    """Change the line of `name` in one host's /etc/hosts; {net} is the laboratory's network."""
    return lambda scene: scene.lab.set_hosts(number, {name: line.format(net=scene.lab.net)})


def own_name(*numbers: int, address: str) -> Injection:
    """Give hosts a wrong line for their own name; an empty address leaves it out."""

    def inject(scene: Scene) -> None:
        for number in numbers:
            name = scene.lab.names[number]
            scene.lab.set_hosts(number, {name: f"{address} {name}" if address else ""})

    return inject


def dead_ipv6_first(scene: Scene) -> None:
    """Let nodes 1 and 2 see an IPv6 address of node 0 first, which nobody has."""
    for number in scene.everywhere:
        scene.lab.run(number, f"ip addr add fd77::{number + 1}/64 dev eth0 nodad")
    for number in (1, 2):
        line = f"fd77::{_DEAD_ADDRESS} node0\n{scene.lab.ip(0)} node0"
        scene.lab.set_hosts(number, {"node0": line})


def duplicate_address(scene: Scene) -> None:
    """Give node 2 the address of node 1, too."""
    old, new = scene.lab.ip(2), scene.lab.ip(1)
    scene.lab.run(2, f"ip addr del {old}/24 dev eth0; ip addr add {new}/24 dev eth0")


def same_host_name(scene: Scene) -> None:
    """Let nodes 1 and 2 be clones that nobody renamed: both are called worker."""
    for number in (1, 2):
        scene.lab.run(number, "hostname worker")
        scene.lab.write_etc(number, "hostname", "worker\n")
        name = scene.lab.names[number]
        scene.lab.set_hosts(number, {name: f"{scene.lab.ip(number)} {name} worker"})


# ---- interfaces and routes


def docker0_asked(scene: Scene) -> None:
    """Make gloo take docker0, which has one address on all machines."""
    for number in scene.everywhere:
        scene.add_nic(number, "docker0", "172.17.0.1/16")
        scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "docker0"


def docker0_named(scene: Scene) -> None:
    """Let every host's own name be the address of docker0."""
    for number in scene.everywhere:
        scene.add_nic(number, "docker0", "172.17.0.1/16")
    own_name(*scene.everywhere, address="172.17.0.1")(scene)


def renamed_nic(scene: Scene) -> None:
    """Ask for eth0 on all hosts, which is called ens5 on node 2."""
    for number in scene.everywhere:
        scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "eth0"
    scene.lab.run(
        2, "ip link set eth0 down; ip link set eth0 name ens5;"
        f" ip addr replace {scene.lab.ip(2)}/24 dev ens5; ip link set ens5 up",
    )  # fmt: skip


def wrong_source(scene: Scene) -> None:
    """Send node 0's packets to node 1 with the address of its other network.

    Node 1 filters by the reverse path: it would answer on another interface, so it drops.
    """
    for number in (0, 1):
        scene.add_nic(number, "eth1", f"10.88.0.{number + 1}/24")
    scene.lab.run(0, f"ip route replace {scene.lab.ip(1)}/32 dev eth0 src 10.88.0.1")
    scene.lab.run(1, "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter")


def route(number: int, words: str) -> Injection:
    """Give a host one more route; {0}, {1}, ... are the hosts' addresses, {nobody} no one's."""

    def inject(scene: Scene) -> None:
        addresses = [scene.lab.ip(one) for one in scene.everywhere]
        nobody = f"{scene.lab.net}.{_DEAD_ADDRESS}"
        scene.lab.run(number, f"ip route add {words.format(*addresses, nobody=nobody)}")

    return inject


def interface_down(number: int, name: str) -> Injection:
    """Switch an interface of a host off."""
    return lambda scene: scene.lab.run(number, f"ip link set {name} down")


def other_network(number: int) -> Injection:
    """Let gloo on a host take an interface whose network the others are not in."""

    def inject(scene: Scene) -> None:
        scene.add_nic(number, "eth1", "10.2.7.9/24")
        scene.lab.env[number]["GLOO_SOCKET_IFNAME"] = "eth1"

    return inject


def behind_nat(number: int) -> Injection:
    """Put a host behind a router that gives it another address on the way, in and out."""

    def inject(scene: Scene) -> None:
        lab, own, public = scene.lab, "10.2.7.2", scene.lab.ip(number)
        lab.switch.run(
            f"ip link set p{number} nomaster; ip addr add 10.2.7.1/24 dev p{number};"
            f" ip addr add {lab.net}.250/24 dev br0; ip addr add {public}/24 dev br0;"
            " sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0"
        )
        lab.run(
            number,
            f"ip addr flush dev eth0 scope global; ip addr add {own}/24 dev eth0;"
            " ip route add default via 10.2.7.1",
        )
        lab.switch.run(
            ["nft", "-f", "-"],
            input="table ip nat {\nchain pre {\ntype nat hook prerouting priority -100;\n"
            f'iifname "br0" ip daddr {public} dnat to {own}\n}}\n'
            "chain post {\ntype nat hook postrouting priority 100;\n"
            f"ip saddr {own} snat to {public}\n}}\n}}\n",
        )
        lab.set_hosts(number, {lab.names[number]: f"{own} {lab.names[number]}"})

    return inject


# ---- paths


def black_hole(number: int, mtu: int) -> Injection:
    """Drop frames above `mtu` on one host's wire, without a word (veth)."""

    def inject(scene: Scene) -> None:
        for host in scene.everywhere:
            scene.lab.run(host, f"ethtool -K eth0 {_SEGMENTS_OFF}", check=False)
            scene.lab.switch.run(f"ethtool -K p{host} {_SEGMENTS_OFF}", check=False)
        rules = "\n".join(f'{way} "p{number}" meta length > {mtu} drop' for way in _WAYS)
        head = "type filter hook forward priority 0; policy accept;"
        scene.lab.switch.run(
            ["nft", "-f", "-"],
            input=f"table bridge mtu {{\nchain f {{\n{head}\n{rules}\n}}\n}}\n",
        )

    return inject


_WAYS = ("iifname", "oifname")


def smaller_mtu(scene: Scene) -> None:
    """Give node 1 a smaller MTU than the others."""
    scene.lab.run(1, "ip link set eth0 mtu 1400")


def links(*pairs: tuple[int, int], **faults: float) -> Injection:
    """Set faults of the tap wire, in both directions of each pair."""

    def inject(scene: Scene) -> None:
        for start, end in pairs:
            for link in (scene.lab.link(start, end), scene.lab.link(end, start)):
                for name, value in faults.items():
                    setattr(link, name, value)

    return inject


def hole_without_udp(start: int, end: int, mtu: int) -> Injection:
    """Let packets above `mtu` vanish on a pair (tap), of whose ends drop UDP."""

    def inject(scene: Scene) -> None:
        links((start, end), mtu=mtu)(scene)
        scene.firewall(start, "meta l4proto udp drop")
        scene.firewall(end, "meta l4proto udp drop")

    return inject


def jitter(start: int, end: int, seconds: float) -> Injection:
    """Delay most, not all, of what one host sends to another (tap)."""

    def inject(scene: Scene) -> None:
        scene.lab.link(start, end).jitter = seconds

    return inject


def slow_sender(scene: Scene) -> None:
    """Let node 1 send at 10 Mbit/s."""
    scene.lab.run(1, "tc qdisc replace dev eth0 root tbf rate 10mbit burst 32kb latency 400ms")


# ---- the clock


@functools.cache
def clockshift_library() -> Path:
    """Build the library that shifts the wall clock of a process. Raises without a compiler."""
    folder = Path(tempfile.mkdtemp(prefix="clockshift."))
    folder.chmod(0o755)
    source, target = Path(__file__).with_name("clockshift.c"), folder / "clockshift.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-o", str(target), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return target


def clock(number: int, seconds: float) -> Injection:
    """Shift the wall clock of one host's programs."""

    def inject(scene: Scene) -> None:
        shifted = {"LD_PRELOAD": str(clockshift_library()), "CLOCKSHIFT": f"{seconds:g}"}
        scene.lab.env[number].update(shifted)

    return inject


# ---- the launch


def web_server(scene: Scene) -> None:
    """Let a web server hold MASTER_PORT on node 0."""
    command = [sys.executable, "-m", "http.server", str(MASTER_PORT)]
    scene.lab.popen(0, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for_listener(scene, 0)


_BINDS = """
import pathlib, socket, sys, time
kept = socket.socket()
kept.bind(("", int(sys.argv[1])))
pathlib.Path(sys.argv[2]).touch()
time.sleep(100000)
"""


def port_bound(scene: Scene) -> None:
    """Let a program on node 0 bind MASTER_PORT, and not listen."""
    is_bound = scene.lab.folder / "is_bound"
    scene.lab.popen(0, [sys.executable, "-c", _BINDS, str(MASTER_PORT), str(is_bound)])
    scene.lab.run(0, f"until [ -e {is_bound} ]; do sleep 0.1; done")


def earlier_job(scene: Scene) -> None:
    """Let a job that nobody ended hold MASTER_PORT on node 0."""
    launch = ["torchrun", "--nnodes=1", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    script = scene.lab.folder / "earlier.py"
    script.write_text("import time\ntime.sleep(100000)\n")
    command = [
        sys.executable,
        "-m",
        *_torchrun(launch),
        f"--master-port={MASTER_PORT}",
        str(script),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    scene.lab.popen(
        0, command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _wait_for_listener(scene, 0)


def _torchrun(launch: list[str]) -> list[str]:
    return ["torch.distributed.run", *launch[1:]]


def _wait_for_listener(scene: Scene, number: int, port: int = MASTER_PORT) -> None:
    look = f"for i in $(seq 600); do grep -qi ':{port:04X} .* 0A ' /proc/net/tcp"
    look += " /proc/net/tcp6 && exit 0; sleep 0.1; done; exit 1"
    scene.lab.run(number, look, limit_s=90)


def not_started(scene: Scene) -> None:
    """Start nothing on node 2."""
    scene.missing.add(2)


def told(number: int, **words: object) -> Injection:
    """Tell one host something else of the launch."""
    return lambda scene: scene.say(number, **words)


def ranks_swapped(scene: Scene) -> None:
    """Give node 0 and node 1 each other's numbers: rank 0 is not at MASTER_ADDR."""
    scene.say(0, node_rank=1)
    scene.say(1, node_rank=0)


def endpoint_of(host: str, *numbers: int) -> Injection:
    """Name another host as the master, on some hosts (none: on all)."""

    def inject(scene: Scene) -> None:
        for number in numbers or scene.everywhere:
            scene.say(number, master_addr=host, endpoint=f"{host}:{MASTER_PORT}")

    return inject


def unrecognised_endpoint(scene: Scene) -> None:
    """Name node 0 by its address, which its own name does not resolve to (gloo is told better)."""
    own_name(0, address="127.0.1.1")(scene)
    endpoint_of(scene.lab.ip(0))(scene)
    variable(GLOO_SOCKET_IFNAME="eth0")(scene)


def shared_endpoint(scene: Scene) -> None:
    """Meet at a name that has the addresses of nodes 0 and 1, as of a service without one."""
    lines = "\n".join(f"{scene.lab.ip(number)} service" for number in (0, 1))
    for number in scene.everywhere:
        scene.lab.set_hosts(number, {"node0": f"{scene.lab.ip(0)} node0\n{lines}"})
    endpoint_of("service")(scene)


def own_name_unknown(scene: Scene) -> None:
    """Let node 0 be called alpha, which no other node can resolve."""
    scene.lab.run(0, "hostname alpha")
    scene.lab.write_etc(0, "hostname", "alpha\n")
    scene.lab.set_hosts(0, {"node0": f"{scene.lab.ip(0)} alpha node0"})


def ranks_overlap(scene: Scene) -> None:
    """Tell each node its number as RANK, though each runs two ranks."""
    for number in scene.everywhere:
        scene.lab.env[number].update(LOCAL_WORLD_SIZE="2", WORLD_SIZE="6", OMP_NUM_THREADS="1")


def world_of(size: int) -> Injection:
    """Tell all nodes another WORLD_SIZE."""

    def inject(scene: Scene) -> None:
        for number in scene.everywhere:
            scene.say(number, num_nodes=size)

    return inject


def list_of(number: int, *names: str) -> Injection:
    """Give one host another list of nodes."""
    return lambda scene: scene.nodes.update({number: ",".join(names)})


def endpoint_localhost(scene: Scene) -> None:
    """Name localhost as the master, everywhere."""
    for number in scene.everywhere:
        scene.say(number, master_addr="localhost", endpoint=f"localhost:{MASTER_PORT}")


def variable(*numbers: int, **variables: str) -> Injection:
    """Set environment variables on some hosts (none: on all)."""

    def inject(scene: Scene) -> None:
        for number in numbers or scene.everywhere:
            scene.lab.env[number].update(variables)

    return inject
