"""Facts of host, names, interfaces and ports, read from machines made of files."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rankscope.preflight.facts import host, interfaces, names, ports, processes
from rankscope.preflight.links import Link, read_links
from rankscope.preflight.system import System
from tests.preflight.healthy import Recorded, write

HOSTS = """127.0.0.1 localhost
# 10.9.9.9 node1
127.0.1.1\tNODE1.local node1   # put there by the installer
10.0.0.1  node0 head
10.0.0.7  other
"""
ETH0 = Link("eth0", ("10.0.0.2/24", "fd00::2/64"), ("up", "running"), 9000, 25000, "full", 3, 4, 5)


def test_names_and_the_lines_that_mean_them(tmp_path: Path) -> None:
    write(tmp_path, {"/etc/hosts": HOSTS, "/proc/sys/kernel/hostname": "node1\n"})
    system = Recorded(
        root=tmp_path, answers={"node1": ("127.0.1.1",), "head": ("10.0.0.1",)}, reverse_ms=1200.0
    )
    facts = names.collect(system, "head", ["node2", "10.0.0.9"])
    assert facts.own.addresses == ("127.0.1.1",)
    assert facts.master is not None
    assert facts.master.addresses == ("10.0.0.1",)
    assert [line.number for line in facts.hosts_lines] == [3, 4]
    assert facts.hosts_lines[0].text == "127.0.1.1 NODE1.local node1"
    assert (facts.reverse_ms, facts.reverse_of) == (1200.0, "10.0.0.1")


def test_without_a_master_nothing_is_asked_of_it(tmp_path: Path) -> None:
    write(tmp_path, {"/proc/sys/kernel/hostname": "lonely\n"})
    facts = names.collect(Recorded(root=tmp_path), "", [])
    assert facts.master is None
    assert facts.own.error.startswith("EAI_NONAME")
    assert (facts.reverse_ms, facts.reverse_of) == (-1.0, "")


def test_the_host(tmp_path: Path) -> None:
    write(tmp_path, {
        "/proc/sys/kernel/hostname": "gpu7\n", "/etc/machine-id": "abc\n",
        "/etc/os-release": 'NAME="X"\nPRETTY_NAME="X Linux 3"\n',
        "/proc/self/cgroup": "0::/kubepods.slice/pod1/c1\n",
        "/sys/fs/cgroup/kubepods.slice/pod1/cpu.max": "50000 100000\n",
        "/usr/sbin/nft": "", "/usr/sbin/ufw": "", "/etc/ufw/ufw.conf": "ENABLED=no\n",
        "/usr/bin/firewall-cmd": "", "/proc/77/comm": "firewalld\n",
    })  # fmt: skip
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/net").symlink_to("net:[4026531840]")
    facts = host.collect(System(root=tmp_path, environ={}))
    assert (facts.hostname, facts.machine_id, facts.os_name) == ("gpu7", "abc", "X Linux 3")
    assert facts.network_namespace == 4026531840
    assert facts.container == "kubepods"
    assert facts.num_cores == 1  # half a core is one thread
    assert facts.firewall_tools == ("firewalld", "nft")  # ufw is there, and switched off


@pytest.mark.parametrize(
    ("default", "modules", "tools"),
    [
        ("/usr/sbin/iptables-nft", "nf_tables 1 0 - Live 0x0\n", ("nft", "iptables")),
        ("/usr/sbin/iptables-legacy", "", ("nft", "iptables-legacy")),
        (
            "/usr/sbin/iptables-nft",
            "iptable_filter 16384 1 - Live 0x0\nip_tables 40960 1 iptable_filter, Live 0x0\n",
            ("nft", "iptables", "iptables-legacy"),
        ),
    ],
)
def test_tables_of_the_older_kind_have_a_tool_of_their_own(
    tmp_path: Path, default: str, modules: str, tools: tuple[str, ...]
) -> None:
    names = ("nft", "iptables", "iptables-legacy")
    write(tmp_path, {"/proc/modules": modules} | {f"/usr/sbin/{name}": "" for name in names})
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    (tmp_path / "etc/alternatives/iptables").symlink_to(default)
    assert host.collect(System(root=tmp_path, environ={})).firewall_tools == tools


def test_a_bare_directory_is_a_host_of_which_nothing_is_known(tmp_path: Path) -> None:
    facts = host.collect(System(root=tmp_path, environ={}))
    assert (facts.machine_id, facts.boot_id, facts.container) == ("", "", "")
    assert facts.is_host_network is None
    assert facts.firewall_tools == ()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/sys/class/net/eth0/device/vendor": "1"}, True),
        ({"/sys/class/net/eth0/iflink": "9", "/sys/class/net/eth0/ifindex": "2"}, False),
        ({"/sys/class/net/lo/iflink": "1", "/sys/class/net/lo/ifindex": "1"}, None),
    ],
)
def test_whose_network_it_is(tmp_path: Path, files: dict[str, str], expected: bool | None) -> None:
    write(tmp_path, files)
    assert host.collect(System(root=tmp_path, environ={})).is_host_network is expected


TIME_ERROR = 5  # adjtimex(2): "the system clock is not synchronized"


@pytest.mark.skipif(sys.platform != "linux", reason="adjtimex is Linux's")
def test_the_kernel_says_whether_its_clock_is_synchronised() -> None:
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    assert host.clock_is_synchronised() is (state != TIME_ERROR)


def test_interfaces_with_what_the_kernel_shows_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, {
        "/sys/class/net/eth0/carrier_changes": "7", "/sys/class/net/docker0/x": "",
        "/proc/sys/net/ipv4/conf/all/rp_filter": "0\n",
        "/proc/sys/net/ipv4/conf/eth0/rp_filter": "2\n",
        "/proc/sys/net/ipv4/neigh/default/gc_thresh3": "4096\n",
        "/proc/sys/kernel/hostname": "n\n",
    })  # fmt: skip
    links = (ETH0, Link("docker0", ("172.17.0.1/16",), ("up",)))
    facts = interfaces.collect(Recorded(root=tmp_path, environ={}, interfaces=links))
    eth0, docker0 = facts.interfaces
    assert (eth0.carrier_changes, eth0.rp_filter, eth0.kind) == (7, 2, "")
    assert (eth0.speed_mbit, eth0.duplex, eth0.mtu_bytes, eth0.num_errors) == (
        25000, "full", 9000, 3,
    )  # fmt: skip
    assert (docker0.kind, docker0.has_carrier, docker0.rp_filter) == ("docker", False, 0)
    assert facts.gc_thresh3 == 4096


def test_sysfs_of_another_namespace_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, {"/sys/class/net/eth0/carrier_changes": "7", "/sys/class/net/eth9/x": ""})
    facts = interfaces.collect(Recorded(root=tmp_path, environ={}, interfaces=(ETH0,)))
    assert facts.interfaces[0].carrier_changes == -1


def test_links_of_this_machine() -> None:
    links = {link.name: link for link in read_links()}
    assert set(links) == set(psutil.net_if_addrs()) | set(psutil.net_if_stats())
    loopback = [link for link in links.values() if "loopback" in link.flags]
    assert "127.0.0.1/8" in loopback[0].addresses
    assert all(link.mtu_bytes > 0 for link in links.values())


@pytest.mark.parametrize(
    ("name", "is_virtual"),
    [("eth0", False), ("ib0", False), ("br0", False), ("bond0", False), ("enp3s0", False),
     ("br-1a2b", True), ("docker0", True), ("veth12", True), ("tailscale0", True), ("wg0", True),
     ("wlan0", False), ("cni0", True), ("virbr0", True), ("tmfifo_net0", True)],
)  # fmt: skip
def test_kinds(name: str, is_virtual: bool) -> None:
    assert bool(interfaces.kind_of(name)) == is_virtual


def test_ports_from_files(tmp_path: Path) -> None:
    write(tmp_path, {
        "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "/proc/net/sockstat": "sockets: used 9\nTCP: inuse 5 orphan 0 tw 31 alloc 9 mem 1\n",
        "/proc/sys/net/netfilter/nf_conntrack_count": "12\n",
        "/proc/sys/net/netfilter/nf_conntrack_max": "100\n",
        "/proc/uptime": "1000.0 1\n",
    })  # fmt: skip
    facts = ports.collect(System(root=tmp_path, environ={}), 29500, True)
    assert (facts.range_low, facts.range_high, facts.num_time_wait) == (32768, 60999, 31)
    assert (facts.conntrack_count, facts.conntrack_max) == (12, 100)
    assert facts.master_busy is None
    assert facts.leftovers == ()


def test_what_cannot_be_read_is_not_zero(tmp_path: Path) -> None:
    facts = ports.collect(System(root=tmp_path, environ={}), 29500, True)
    assert (facts.num_time_wait, facts.conntrack_count, facts.conntrack_max) == (-1, -1, -1)
    assert ports.range_of(System(root=tmp_path)) is None


_TABLE = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid timeout ino\n"
    "   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0 0 4242 1\n"
    "   1: 0100007F:733D 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0 0 77 1\n"
)  # 0x733C is 29500


def process(root: Path, pid: int, parent: int, command: str, environ: str, *links: str) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    fields = ["S", str(parent), *["0"] * 17, str(100 * ticks), "0"]
    write(root, {
        f"/proc/{pid}/stat": f"{pid} (a ) b) " + " ".join(fields),
        f"/proc/{pid}/cmdline": command.replace(" ", "\0") + "\0",
        f"/proc/{pid}/status": f"Name: x\nUid:\t{os.geteuid()}\t{os.geteuid()}\t0\t0\n",
        f"/proc/{pid}/environ": environ.replace(" ", "\0"),
    })  # fmt: skip
    (root / f"proc/{pid}/fd").mkdir()
    for number, target in enumerate(links):
        (root / f"proc/{pid}/fd/{number}").symlink_to(target)


def machine(root: Path) -> System:
    write(root, {"/proc/net/tcp": _TABLE, "/proc/uptime": "1000.0 1\n"})
    return System(root=root, environ={})


def test_the_owner_of_a_port(tmp_path: Path) -> None:
    system = machine(tmp_path)
    process(tmp_path, 4711, 1, "python train.py --api-key hunter2abc", "", "socket:[4242]")
    owner = ports.owner_of(system, 29500)
    assert owner is not None
    assert (owner.pid, owner.age_s, owner.is_launcher) == (4711, 900.0, False)
    assert owner.command.startswith("python train.py")
    assert "hunter2" not in owner.command
    assert ports.owner_of(system, 29501) is None  # a connection, nobody listens
    assert ports.collect(system, 29500, is_master=False).master_busy is None


def test_an_owner_that_may_not_be_seen(tmp_path: Path) -> None:
    owner = ports.owner_of(machine(tmp_path), 29500)
    assert owner is not None
    assert (owner.pid, owner.user) == (0, "root")


@pytest.mark.parametrize(
    ("command", "environ", "links", "is_left"),
    [
        ("/usr/bin/python3 train.py", "RANK=0 WORLD_SIZE=2", ("socket:[4242]",), True),
        ("python -m torch.distributed.run t.py", "", ("socket:[4242]",), True),
        ("python train.py", "RANK=0 WORLD_SIZE=2", ("/dev/nvidia3",), True),
        ("python train.py", "RANK=0 WORLD_SIZE=2", ("/dev/nvidiactl", "socket:[5]"), False),
        ("python -m http.server 29500", "", ("socket:[4242]",), False),
        ("bash run.sh", "RANK=0 WORLD_SIZE=2", ("socket:[4242]",), False),
        ("python -m rankscope preflight", "RANK=0 WORLD_SIZE=2", ("socket:[4242]",), False),
    ],
)
def test_what_an_earlier_job_left(
    tmp_path: Path, command: str, environ: str, links: tuple[str, ...], is_left: bool
) -> None:
    system = machine(tmp_path)
    process(tmp_path, 4711, 1, command, environ, *links)
    left = processes.leftovers(system, time.time())
    assert [one.pid for one in left] == ([4711] if is_left else [])
    # it began 900 s ago: of a job that is older still it is a part
    assert processes.leftovers(system, time.time() - 895) == ()


def test_the_own_launch_is_no_leftover(tmp_path: Path) -> None:
    system = machine(tmp_path)
    me = os.getpid()
    process(tmp_path, 50, 1, "torchrun --nnodes 2 train.py", "", "socket:[4242]")
    process(tmp_path, me, 50, "python -m rankscope", "RANK=0 WORLD_SIZE=2")
    process(tmp_path, 60, 50, "python train.py", "RANK=1 WORLD_SIZE=2", "/dev/nvidia0")
    assert processes.leftovers(system, time.time()) == ()
    owner = ports.owner_of(system, 29500)
    assert owner is not None
    assert owner.is_launcher


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_real_listener_is_found_with_its_command() -> None:
    code = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        owner = ports.owner_of(System(), int(child.stdout.readline()))
        assert owner is not None
        assert owner.pid == child.pid
        assert owner.command.startswith(sys.executable)
        assert 0 <= owner.age_s < 600


def test_the_own_listener_is_not_in_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = ports.collect(System(), server.getsockname()[1], is_master=True)
        assert facts.master_busy is None
