"""Which interface gloo and NCCL take, by the rules that stand in their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.preflight.facts import choice
from rankscope.preflight.links import Link
from tests.preflight.healthy import Recorded, write

UP = ("up", "running")
LO = Link("lo", ("127.0.0.1/8", "::1/128"), ("up", "running", "loopback"))
ETH0 = Link("eth0", ("10.0.0.2/24", "fd00::2/64", "fe80::1/64"), UP)
ETH1 = Link("eth1", ("10.1.0.2/24",), UP)
IB0 = Link("ib0", ("10.2.0.2/24",), UP)
DOCKER0 = Link("docker0", ("172.17.0.1/16",), UP)
DOWN = Link("eth2", ("10.3.0.2/24",), ("up",))
ONLY6 = Link("eth3", ("fd01::3/64",), UP)
BRIDGE = Link("br-12", ("172.18.0.1/16",), UP)
BARE = Link("eth4", (), UP)


def machine(tmp_path: Path, links: tuple[Link, ...], answers: tuple[str, ...] = (), **environ: str
            ) -> Recorded:  # fmt: skip
    write(tmp_path, {"/proc/sys/kernel/hostname": "n1\n"})
    known = {"n1": answers} if answers else {}
    return Recorded(root=tmp_path, environ=environ, answers=known, interfaces=links)


@pytest.mark.parametrize(
    ("answers", "interface", "address"),
    [
        (("10.0.0.2",), "eth0", "10.0.0.2"),
        (("127.0.1.1", "10.0.0.2"), "lo", "127.0.1.1"),
        (("10.9.9.9", "10.0.0.2"), "eth0", "10.0.0.2"),  # what cannot be bound is passed over
        (("fd00::2",), "eth0", "fd00::2"),
        (("fe80::1%eth0",), "eth0", "fe80::1"),
        (("172.17.0.1",), "docker0", "172.17.0.1"),
        ((), "lo", "127.0.0.1"),
        (("10.9.9.9",), "lo", "127.0.0.1"),
    ],
)
def test_gloo_takes_what_the_host_name_means(
    tmp_path: Path, answers: tuple[str, ...], interface: str, address: str
) -> None:
    links = (LO, ETH0, DOCKER0)
    (chosen,) = choice.gloo(machine(tmp_path, links, answers), links)
    assert (chosen.interface, chosen.address) == (interface, address)
    assert bool(chosen.problem) == (address == "127.0.0.1")


def test_gloo_takes_the_named_interfaces(tmp_path: Path) -> None:
    links = (LO, ETH0, ETH1)
    system = machine(tmp_path, links, ("10.0.0.2",), GLOO_SOCKET_IFNAME="eth1,eth0")
    chosen = choice.gloo(system, links)
    assert [c.address for c in chosen] == ["10.1.0.2", "10.0.0.2"]
    assert chosen[0].how == "GLOO_SOCKET_IFNAME=eth1,eth0"


@pytest.mark.parametrize(
    ("value", "problem"),
    [("eth9", "no interface is named eth9"), ("eth", "no interface is named eth"),
     ("^lo", "NCCL's syntax"), ("=eth0", "NCCL's syntax"), ("eth4", "has no address"),
     (" eth0", "no interface is named  eth0")],
)  # fmt: skip
def test_gloo_takes_no_prefixes(tmp_path: Path, value: str, problem: str) -> None:
    links = (LO, ETH0, BARE)
    (chosen,) = choice.gloo(machine(tmp_path, links, GLOO_SOCKET_IFNAME=value), links)
    assert problem in chosen.problem
    assert chosen.address == ""


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ((LO, ETH0, ETH1, DOCKER0), ["eth0", "eth1"]),
        ((LO, ETH0, IB0), ["ib0"]),
        ((LO, DOCKER0), ["docker0"]),
        ((LO,), ["lo"]),
        ((LO, ETH0, BRIDGE), ["eth0", "br-12"]),  # not left out by its name
        ((LO, DOWN, ETH0), ["eth0"]),
        ((LO, ONLY6, ETH0), ["eth0", "eth3"]),  # IPv4 addresses are listed first
        ((LO, ONLY6), ["eth3"]),
        ((BARE,), [""]),
    ],
)
def test_nccl_without_a_variable(
    tmp_path: Path, links: tuple[Link, ...], expected: list[str]
) -> None:
    chosen = choice.nccl(machine(tmp_path, links), links)
    assert [c.interface for c in chosen] == expected
    assert bool(chosen[0].problem) == (expected == [""])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("eth", ["eth0", "eth1"]), ("=eth", []), ("=eth1", ["eth1"]), ("^eth", ["lo", "ib0"]),
     ("^=eth0", ["lo", "eth1", "ib0"]), ("ib,eth1", ["eth1", "ib0"]), ("eth1:4", ["eth1"]),
     ("e", ["ib0"]), ("^", ["ib0"]), ("nope", [])],
)  # fmt: skip
def test_nccl_with_a_variable(tmp_path: Path, value: str, expected: list[str]) -> None:
    """A value of one character is ignored, so that ib0 wins again."""
    links = (LO, ETH0, ETH1, IB0)
    chosen = choice.nccl(machine(tmp_path, links, NCCL_SOCKET_IFNAME=value), links)
    assert [c.interface for c in chosen if not c.problem] == expected
    assert bool(chosen[0].problem) == (not expected)


def test_nccl_takes_the_asked_family(tmp_path: Path) -> None:
    links = (LO, ETH0, ETH1)
    chosen = choice.nccl(machine(tmp_path, links, NCCL_SOCKET_FAMILY="AF_INET6"), links)
    assert [(c.interface, c.address) for c in chosen] == [("eth0", "fd00::2")]


def test_nccl_takes_the_subnet_of_its_comm_id(tmp_path: Path) -> None:
    links = (LO, ETH0, ETH1)
    system = machine(tmp_path, links, ("10.1.0.9",), NCCL_COMM_ID="n1:4000")
    assert [c.interface for c in choice.nccl(system, links)] == ["eth1"]
    system = machine(tmp_path, links, ("10.9.0.9",), NCCL_COMM_ID="n1:4000")
    assert [c.interface for c in choice.nccl(system, links)] == ["eth0", "eth1"]


def test_nccl_reads_its_files_and_the_environment_wins(tmp_path: Path) -> None:
    write(tmp_path, {
        "/etc/nccl.conf": "# NCCL_SOCKET_IFNAME=ib0\nNCCL_SOCKET_IFNAME==eth0\nNCCL_X=1\n",
        "/home/ann/.nccl.conf": "NCCL_SOCKET_IFNAME==eth1\n",
        "/site.conf": "NCCL_SOCKET_IFNAME=lo\n",
    })  # fmt: skip
    links = (LO, ETH0, ETH1)

    def first(**environ: str) -> str:
        return choice.nccl(machine(tmp_path, links, **environ), links)[0].interface

    assert first() == "eth0"
    assert first(HOME="/home/ann") == "eth1"
    assert first(HOME="/home/ann", NCCL_SOCKET_IFNAME="eth0") == "eth0"
    assert first(HOME="/home/ann", NCCL_CONF_FILE="/site.conf") == "lo"
