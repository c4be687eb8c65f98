"""How things are broken in a scene: firewalls, second networks, routers, programs in between."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.preflight.drawn.world import World
from tests.preflight.scene import Scene

PROGRAM = Path(__file__).with_name("middle.py")
VERDICTS = {
    "drop": "drop",
    "reset": "reject with tcp reset",
    "prohibited": "reject with icmpx type admin-prohibited",
}
SHARED = "--share {shared} --wait 20"
_READY_S = 20.0


def filter_table(
    scene: Scene, number: int, *rules: str, hook: str = "input", table: str = "fw"
) -> None:
    """Give a host a table of rules for what comes in (or goes out)."""
    loop = "iif lo accept" if hook == "input" else "oif lo accept"
    head = f"type filter hook {hook} priority 0; policy accept;"
    body = "\n".join((head, loop, *rules))
    scene.nft(number, f"table inet {table} {{\nchain c {{\n{body}\n}}\n}}\n")


def ports(low: int, high: int) -> str:
    """Return the match of a new connection to these ports."""
    return f"tcp dport {low}-{high} ct state new"


def data_rules(dport: str, verdict: str) -> tuple[str, ...]:
    """Return rules that let handshakes pass and take what carries data."""
    match = f"tcp dport {dport} ct direction original"
    return (
        f"{match} tcp flags & psh == psh {verdict}",
        f"{match} meta length > 80 {verdict}",
    )


def bridge_rules(scene: Scene, *rules: str) -> None:
    """Filter on the wire, where no node has a rule."""
    body = "\n".join(("type filter hook forward priority 0; policy accept;", *rules))
    scene.lab.switch.run(
        ["nft", "-f", "-"], input=f"table bridge wire {{\nchain f {{\n{body}\n}}\n}}\n"
    )


def redirect(scene: Scene, number: int, match: str, port: int, *, hook: str) -> None:
    """Turn a host's outgoing ("output") or incoming ("prerouting") connections to a port."""
    head = f"type nat hook {hook} priority -100; policy accept;"
    local = "oif lo accept" if hook == "output" else "iif lo accept"
    scene.nft(
        number,
        f"table ip mesh {{\nchain c {{\n{head}\n{local}\n{match} redirect to :{port}\n}}\n}}\n",
    )


def middle(scene: Scene, number: int, port: int, manner: str) -> None:
    """Start a program that accepts connections of others and answers in its own manner."""
    child = scene.lab.popen(
        number, [sys.executable, "-S", str(PROGRAM), str(port), manner], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        raise RuntimeError(f"the program on port {port} did not start")


def second_nic(scene: Scene, number: int, name: str, address: str, segment: str = "") -> None:
    """Plug one more interface into the switch: alone, or on another segment with others."""
    host, switch, port = scene.lab.hosts[number], scene.lab.switch, f"{name}p{number}"
    subprocess.run(
        ["nsenter", f"--target={switch.pid}", "--net", "ip", "link", "add", port, "type", "veth",
         "peer", "name", name, "netns", str(host.pid)],
        check=True, capture_output=True,
    )  # fmt: skip
    switch.run(f"ip link set {port} up")
    if segment:
        switch.run(f"ip link add {segment} type bridge", check=False)
        switch.run(f"ip link set {segment} up; ip link set {port} master {segment}")
    host.run(f"ip addr add {address} dev {name}; ip link set {name} up")


def route_away(scene: Scene, number: int, net: str) -> tuple[str, str]:
    """Move a host behind a router, into a network of its own; return its address and gateway.

    The switch is the router. It has an address in the laboratory's network and routes to it.
    """
    lab, own, gateway = scene.lab, f"{net}.2", f"{net}.1"
    lab.switch.run(
        f"ip link set p{number} nomaster; ip addr add {gateway}/24 dev p{number};"
        f" ip addr add {lab.net}.250/24 dev br0; sysctl -qw net.ipv4.ip_forward=1"
        " net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.br0.send_redirects=0"
    )
    lab.run(
        number,
        f"ip addr flush dev eth0 scope global; ip addr add {own}/24 dev eth0;"
        f" ip route add default via {gateway}",
    )
    return own, gateway


def route_back(scene: Scene, numbers: list[int], net: str) -> None:
    """Tell hosts the way to the network behind the router."""
    for number in numbers:
        scene.lab.run(number, f"ip route add {net}.0/24 via {scene.lab.net}.250")


def rename(scene: Scene, number: int, address: str, *, own: str = "") -> None:
    """Let every host know a node by another address; `own`: as the node itself knows it."""
    name = scene.lab.names[number]
    for host in scene.everywhere:
        told = own if own and host == number else address
        scene.lab.set_hosts(host, {name: f"{told} {name}"})


def dual_stack(scene: Scene, world: World, net: str = "fd77") -> list[str]:
    """Give every host an IPv6 address beside the other; return them by number."""
    addresses = [f"{net}::{tail:x}" for tail in world.tails]
    for number, address in enumerate(addresses):
        scene.lab.run(
            number,
            "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0 net.ipv6.conf.eth0.accept_dad=0;"
            f" ip addr add {address}/64 dev eth0 nodad",
        )
    return addresses


def hosts_file(scene: Scene, number: int, *lines: str) -> None:
    """Write the whole of a host's /etc/hosts."""
    scene.lab.write_etc(number, "hosts", "\n".join(("127.0.0.1 localhost", *lines)) + "\n")


def wait_for(scene: Scene, number: int, look: str) -> None:
    """Wait until a command succeeds on a host."""
    end = time.monotonic() + _READY_S
    while scene.lab.run(number, look, check=False).returncode:
        if time.monotonic() > end:
            raise RuntimeError(f"{look} does not come true")
        time.sleep(0.1)
