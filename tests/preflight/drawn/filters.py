"""Random ports closed by the tools that people have: iptables, legacy iptables, ufw, firewalld."""

from __future__ import annotations

import random
import shlex
import subprocess

from tests.preflight.drawn import tools
from tests.preflight.drawn.world import RANDOM_PORTS, Case, Catalogue, World, at, wanted
from tests.preflight.scene import Scene

KINDS = Catalogue()
kind = KINDS.add
_VERDICTS = ("DROP", "REJECT", "REJECT --reject-with tcp-reset")
_RANDOM = ":".join(map(str, RANDOM_PORTS))


def _iptables(tool: str, world: World, rng: random.Random) -> Case:
    number, verdict = rng.choice(world.dialled), rng.choice(_VERDICTS)
    chain = rng.choice(("INPUT", "jobs"))  # a chain of one's own, as Docker and kube-proxy have
    rules = [f"-A {chain} -p tcp --syn --dport {_RANDOM} -j {verdict}"]
    if chain != "INPUT":
        rules = [f"-N {chain}", f"-A INPUT ! -i lo -j {chain}", *rules]
    else:
        rules = ["-A INPUT -i lo -j ACCEPT", *rules]
    return Case(
        f"node{number}: the random ports closed by {tool} in {chain}, {verdict}",
        lambda scene: scene.lab.run(number, "; ".join(f"{tool} {rule}" for rule in rules)),
        wanted("port.ephemeral", at(number)),
    )  # fmt: skip


@kind("iptables", "filters", "breaks", remedy="command", needs=("iptables",))
def iptables(world: World, rng: random.Random) -> Case:
    return _iptables("iptables", world, rng)


@kind("iptables-legacy", "filters", "breaks", remedy="command", needs=("iptables-legacy",))
def iptables_legacy(world: World, rng: random.Random) -> Case:
    return _iptables("iptables-legacy", world, rng)


@kind("ufw", "filters", "breaks", remedy="command", needs=("ufw",))
def ufw(world: World, rng: random.Random) -> Case:
    number, default = rng.choice(world.dialled), rng.choice(("deny", "reject"))

    def inject(scene: Scene) -> None:
        scene.lab.own_etc()
        allowed = f"ufw allow 22/tcp; ufw allow {world.master_port}/tcp"
        scene.lab.run(number, f"ufw default {default} incoming; {allowed}; ufw --force enable")

    return Case(
        f"node{number}: ufw, incoming: {default}, open are 22 and {world.master_port}", inject,
        wanted("port.ephemeral", at(number)),
    )  # fmt: skip


@kind("firewalld", "filters", "breaks", remedy="command", needs=("firewalld",))
def firewalld(world: World, rng: random.Random) -> Case:
    number, zone = rng.choice(world.dialled), rng.choice(("public", "drop", "work"))

    def inject(scene: Scene) -> None:
        scene.lab.own_etc()
        _start_firewalld(scene, number)
        scene.lab.run(
            number,
            f"firewall-cmd --set-default-zone={zone}; firewall-cmd --permanent --zone={zone}"
            f" --add-port={world.master_port}/tcp; firewall-cmd --reload",
        )

    return Case(
        f"node{number}: firewalld, zone {zone}, open is {world.master_port}", inject,
        wanted("port.ephemeral", at(number)),
    )  # fmt: skip


def _start_firewalld(scene: Scene, number: int) -> None:
    """Start firewalld on a host, with a bus of its own."""
    lab = scene.lab
    bus = f"unix:path={lab.folder}/bus{number}"
    lab.env[number]["DBUS_SYSTEM_BUS_ADDRESS"] = bus
    lab.popen(
        number, ["dbus-daemon", "--session", f"--address={bus}", "--nofork", "--nopidfile"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    tools.wait_for(scene, number, f"test -S {shlex.quote(bus.removeprefix('unix:path='))}")
    lab.popen(
        number, ["firewalld", "--nofork", "--nopid"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    tools.wait_for(scene, number, "firewall-cmd --state")
