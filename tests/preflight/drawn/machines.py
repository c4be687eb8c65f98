"""Paths that carry badly, clocks, and what is wrong on one machine."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.preflight.drawn.world import Case, Catalogue, Truth, World, at, between, wanted, warned
from tests.preflight.injections import black_hole, clock, links
from tests.preflight.injections_machine import full_temporary, limit, read_only, tmpfs
from tests.preflight.scene import Scene

KINDS = Catalogue()
kind = KINDS.add


@kind("mtu-hole-node", "paths", "breaks")
def mtu_hole_node(world: World, rng: random.Random) -> Case:
    number, mtu = rng.choice(world.everywhere), rng.choice((1500, 4000, 8000))
    return Case(
        f"frames above {mtu} vanish at node{number}; the interfaces have 9000",
        black_hole(number, mtu), wanted("net.mtu.path", at(number)), mtu=9000,
    )  # fmt: skip


@kind("mtu-hole-pair", "paths", "breaks", needs=("tun",))
def mtu_hole_pair(world: World, rng: random.Random) -> Case:
    pair = tuple(sorted(rng.sample(world.everywhere, 2)))
    mtu = rng.choice((1280, 1400, 1450))
    return Case(
        f"packets above {mtu} vanish between node{pair[0]} and node{pair[1]}",
        links((pair[0], pair[1]), mtu=mtu), wanted("net.mtu.path", between((pair[0], pair[1]))),
        wire="tap",
    )  # fmt: skip


@kind("mtu-hole-oneway", "paths", "breaks", needs=("tun",))
def mtu_hole_oneway(world: World, rng: random.Random) -> Case:
    start, end = rng.sample(world.everywhere, 2)
    mtu = rng.choice((1280, 1400, 1450))

    def inject(scene: Scene) -> None:
        scene.lab.link(start, end).mtu = mtu

    return Case(
        f"packets above {mtu} vanish from node{start} to node{end}", inject,
        wanted("net.mtu.path", between((start, end))), wire="tap",
    )  # fmt: skip


@kind("mtu-differs", "paths", "works", remedy="command")
def mtu_differs(world: World, rng: random.Random) -> Case:
    number, mtu = rng.choice(world.everywhere), rng.choice((1400, 1450, 1280))
    return Case(
        f"node{number} has an MTU of {mtu}",
        lambda scene: scene.lab.run(number, f"ip link set eth0 mtu {mtu}"),
        warned("net.mtu.differs", at(number)),
    )


def _clock(name: str, seconds: range, truth: Truth, *statuses: str, is_master: bool) -> None:
    """Add a clock that is off; torchrun compares others' heartbeats with the own clock."""

    def draw(world: World, rng: random.Random) -> Case:
        number = 0 if is_master else rng.choice(list(world.everywhere)[1:])
        off_s = rng.choice(seconds)
        return Case(
            f"node{number}'s clock is {off_s:+d} s off", clock(number, off_s),
            wanted("clock.offset", at(number), statuses=statuses),
        )  # fmt: skip

    kind(name, "clock", truth, mode="c10d", needs=("compiler",))(draw)


_BEHIND, _AHEAD = range(-600, -20), range(21, 600)
_clock("clock-behind", _BEHIND, "breaks", "fail", is_master=False)
_clock("clock-ahead", _AHEAD, "works", "warn", "fail", is_master=False)
_clock("clock-master-ahead", _AHEAD, "breaks", "fail", is_master=True)
_clock("clock-master-behind", _BEHIND, "sometimes", "fail", is_master=True)


@kind("delay", "timed", "slow", is_timed=True, needs=("tun",))
def delay(world: World, rng: random.Random) -> Case:
    pair = tuple(sorted(rng.sample(world.everywhere, 2)))
    seconds = rng.choice((0.03, 0.05, 0.08))
    return Case(
        f"{2e3 * seconds:.0f} ms round trip between node{pair[0]} and node{pair[1]}",
        links((pair[0], pair[1]), delay=seconds),
        warned("net.latency", between((pair[0], pair[1]))), wire="tap",
    )  # fmt: skip


@kind("loss-oneway", "timed", "works", is_timed=True, needs=("tun",))
def loss_oneway(world: World, rng: random.Random) -> Case:
    start, end = rng.sample(world.everywhere, 2)
    share = rng.choice((0.03, 0.05, 0.08))

    def inject(scene: Scene) -> None:
        scene.lab.link(start, end).loss = share

    return Case(
        f"{share:.0%} of the packets from node{start} to node{end} are lost", inject,
        warned("net.loss", between((start, end))), wire="tap", is_default=True,
    )  # fmt: skip


@kind("slow-sender", "timed", "slow", is_timed=True)
def slow_sender(world: World, rng: random.Random) -> Case:
    number, mbit = rng.choice(world.everywhere), rng.choice((5, 10, 25))
    rate = f"tbf rate {mbit}mbit burst 32kb latency 400ms"
    return Case(
        f"node{number} sends at {mbit} Mbit/s",
        lambda scene: scene.lab.run(number, f"tc qdisc replace dev eth0 root {rate}"),
        warned("net.bandwidth", at(number)),
        is_default=True,
    )


def _read_only_place(variable: str) -> Callable[[World, random.Random], Case]:
    def draw(world: World, rng: random.Random) -> Case:
        number = rng.choice(world.everywhere)

        def inject(scene: Scene) -> None:
            place = scene.lab.folder / variable.lower()
            place.mkdir()
            place.chmod(0o777)
            scene.lab.run(number, f"mount --bind {place} {place}; mount -o remount,bind,ro {place}")
            for one in world.everywhere:
                scene.lab.env[one][variable] = str(place)

        return Case(
            f"{variable} is on a read-only mount at node{number}", inject,
            wanted("fs.write fs.free fs.cache fs.home", at(number), statuses=("warn", "fail")),
            job=f"cache:{variable}",
        )  # fmt: skip

    return draw


kind("home-read-only", "storage", "breaks")(_read_only_place("HOME"))
kind("hf-home-read-only", "storage", "breaks")(_read_only_place("HF_HOME"))
kind("torch-home-read-only", "storage", "breaks")(_read_only_place("TORCH_HOME"))


@kind("tmpdir-full", "storage", "works")
def tmpdir_full(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.everywhere)
    return Case(
        f"TMPDIR is full at node{number}", full_temporary(number), warned("fs.free", at(number))
    )  # fmt: skip


@kind("checkpoint-read-only", "storage", "breaks")
def checkpoint_read_only(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.everywhere)
    return Case(
        f"the checkpoint directory is read-only at node{number}", read_only(number),
        wanted("fs.write", at(number)), options="--checkpoint-dir {shared}", job="checkpoint",
        is_default=True,
    )  # fmt: skip


@kind("checkpoint-local", "storage", "breaks")
def checkpoint_local(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.everywhere)
    return Case(
        f"the checkpoint directory is a local one at node{number}",
        tmpfs(number, "{shared}", "4g"), wanted("fs.shared", at(number)), also=("fs.same",),
        options="--checkpoint-dir {shared}", job="checkpoint",
    )  # fmt: skip


@kind("open-files", "limits", "works")
def open_files(world: World, rng: random.Random) -> Case:
    number, count = rng.choice(world.everywhere), rng.choice((64, 128, 256))
    return Case(
        f"{count} open files allowed at node{number}", limit(number, f"--nofile={count}:{count}"),
        wanted("lim.nofile", at(number), statuses=("warn", "fail")),
    )  # fmt: skip


@kind("shared-memory", "limits", "breaks")
def shared_memory(world: World, rng: random.Random) -> Case:
    number, size = rng.choice(world.everywhere), rng.choice((8, 32, 64))
    return Case(
        f"/dev/shm of {size} MiB at node{number}", tmpfs(number, "/dev/shm", f"{size}m"),
        wanted("lim.shm", at(number)), options="--loader-workers 2", job="loader",
    )  # fmt: skip


@kind("variable-differs", "limits", "works")
def variable_differs(world: World, rng: random.Random) -> Case:
    number = rng.choice(world.everywhere)
    name, value = rng.choice(
        (("NCCL_BUFFSIZE", "8388608"), ("NCCL_ALGO", "Ring"), ("OMP_PROC_BIND", "close"))
    )

    def inject(scene: Scene) -> None:
        scene.lab.env[number][name] = value

    return Case(f"{name} is set on node{number} only", inject, warned("env.drift", at(number)))
