"""Each source of samples against a recorded tree, and against this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankscope.node.sources import SOURCES, describe
from rankscope.node.sources.base import Limiter, News, RankProcess, Skipped
from rankscope.node.sources.cgroup import CgroupSource
from rankscope.node.sources.host import DiskSource, HostSource, PressureSource
from rankscope.node.sources.infiniband import InfinibandSource
from rankscope.node.sources.kernel_log import KernelLogSource
from rankscope.node.sources.machine import Machine, SampleSource
from rankscope.node.sources.network import NicSource, TcpSource
from rankscope.node.sources.process import ProcessSampler, ProcessSource
from rankscope.wire.sample_columns import SAMPLE_COLUMNS, SAMPLE_KEYS, SAMPLE_STRING_COLUMNS

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
DOCS = (Path(__file__).parents[3] / "docs/machines.md").read_text()
# `cat /proc/stat` and so on of hosts, cut to what is read
STAT = """cpu  1000 50 300 8000 200 10 40 400 0 0
cpu0 500 25 150 4000 100 5 20 200 0 0
cpu1 500 25 150 4000 100 5 20 200 0 0
ctxt 48546404
procs_blocked 2
"""
LATER = """cpu  1100 50 300 8080 210 10 40 410 0 0
cpu0 590 25 150 4000 105 5 20 205 0 0
cpu1 510 25 150 4080 105 5 20 205 0 0
ctxt 48546504
procs_blocked 0
"""
PROC = {
    "stat": STAT,
    "meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 12582912 kB\nCached: 64 kB\n"
    "Dirty: 8 kB\nSwapTotal: 1024 kB\nSwapFree: 400 kB\nHugePages_Total: 0\n",
    "loadavg": "1.50 0.75 0.25 3/512 12345\n",
    "vmstat": "pgfault 1000\npgmajfault 77\npswpin 3\npswpout 4\noom_kill 2\n",
    "net/dev": "Inter-| Receive | Transmit\n face |bytes packets\n"
    "    lo: 999 9 0 0 0 0 0 0 999 9 0 0 0 0 0 0\n"
    "  eth0: 500 5 1 2 0 0 0 0 300 3 4 6 0 0 0 0\n"
    "  idle0: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
    "net/snmp": "Ip: Forwarding\nIp: 1\n"
    "Tcp: RtoAlgorithm MaxConn CurrEstab InSegs OutSegs RetransSegs InErrs OutRsts\n"
    "Tcp: 1 -1 7 1000 900 12 1 3\n",
    "net/netstat": "TcpExt: ListenDrops TCPTimeouts TCPLostRetransmit TCPBacklogDrop\n"
    "TcpExt: 5 6 7 8\nIpExt: InNoRoutes\nIpExt: 0\n",
    "pressure/cpu": "some avg10=1.00 avg60=0.29 avg300=1.32 total=3698640156\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=32097\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=14974\n",
    "pressure/io": "some avg10=0.00 avg60=0.00 avg300=0.29 total=69743403\n"
    "full avg10=0.00 avg60=0.00 avg300=0.26 total=51810264\n",
    "diskstats": "   7       0 loop0 1 0 1 0 0 0 0 0 0 0 0\n"
    " 259       0 nvme0n1 10 1 16 30 20 2 32 60 3 70 90 0 0 0 0 0 0\n"
    " 259       1 nvme0n1p1 10 1 16 30 20 2 32 60 3 70 90 0 0 0 0 0 0\n"
    " 253       0 dm-0 10 1 16 30 20 2 32 60 3 70 90 0 0 0 0 0 0\n",
    # of `cat /proc/4711/stat`: a name with a parenthesis and a space
    "4711/stat": "4711 (py) thon) S 1 4711 4711 0 -1 4194560 500 0 6 0 250 50 0 0 20 0 9 0 6666 "
    "1000000 300 18446744073709551615\n",
    "4711/task/4711/status": "Name:\tpython\nCpus_allowed:\t3,0000000f\nVmSwap:\t      12 kB\n"
    "voluntary_ctxt_switches:\t31\nnonvoluntary_ctxt_switches:\t4\n",
    "4711/io": "rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\n",
    "4711/task/4711/schedstat": "300000000 7000000 99\n",
    "self/stat": "1 (x) S 1\n",
}
SYS = {
    "class/net/eth0/operstate": "up\n",
    "class/net/eth0/speed": "25000\n",
    "class/net/eth0/carrier_changes": "3\n",
    "class/net/eth0/device": "",
    "class/net/lo/operstate": "unknown\n",
    "block/loop0/size": "8\n",
    "block/nvme0n1/device": "",
    "block/dm-0/size": "8\n",
}
# of two ports of a ConnectX-7; the second is Ethernet and down
PORT = "class/infiniband/mlx5_0/ports/1"
OTHER = "class/infiniband/mlx5_1/ports/1"
INFINIBAND = {
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/phys_state": "5: LinkUp\n",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)\n",
    f"{PORT}/counters/port_xmit_data": "1000\n",
    f"{PORT}/counters/port_rcv_data": "2000\n",
    f"{PORT}/counters/symbol_error": "3\n",
    f"{PORT}/counters/link_downed": "1\n",
    f"{PORT}/counters/port_xmit_wait": "55\n",
    f"{PORT}/hw_counters/out_of_sequence": "8\n",
    f"{PORT}/hw_counters/rnr_nak_retry_err": "9\n",
    f"{OTHER}/state": "1: DOWN\n",
    f"{OTHER}/phys_state": "3: Disabled\n",
    f"{OTHER}/rate": "2.5 Gb/sec (1X SDR)\n",
    f"{OTHER}/counters/port_xmit_data": "N/A\n",
}

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a function that writes files below a directory of this name."""

    def write(name: str, files: dict[str, str]) -> Path:
        for path, text in files.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def machine(tree: Tree, tmp_path: Path) -> Machine:
    return Machine(
        proc=tree("proc", PROC), sys=tree("sys", SYS), cgroups=tmp_path / "cgroups",
        run_directory=tmp_path, kernel_log=tmp_path / "kmsg",
        ranks=lambda: (RankProcess(0, 5, 4711),),
    )  # fmt: skip


def rows(make: type[Any], machine: Machine) -> list[dict[str, Any]]:
    source = make(machine)
    source.open()
    return [dict(row) for row in source.sample()]


def test_host(machine: Machine, tree: Tree) -> None:
    source = HostSource(machine)
    source.open()
    (first,) = source.sample()
    assert "cpu_busiest_ratio" not in first  # there is no time before it
    tree("proc", {"stat": LATER})
    (row,) = ({**one} for one in source.sample())
    assert row.pop("run_disk_free_bytes") > 0
    assert row == {
        "cpu_user_us_total": 1150 * TICK_US // 2, "cpu_system_us_total": 300 * TICK_US // 2
        + 10 * TICK_US // 2 + 40 * TICK_US // 2, "cpu_iowait_us_total": 210 * TICK_US // 2,
        "cpu_steal_us_total": 410 * TICK_US // 2, "cpu_idle_us_total": 8080 * TICK_US // 2,
        "cpu_busiest_ratio": pytest.approx(0.9), "num_cpus": 2, "load_1m": 1.5, "runnable": 2,
        "blocked": 0, "context_switches_total": 48546504, "memory_total_bytes": 16 * GIB,
        "memory_available_bytes": 12 * GIB, "memory_used_bytes": 4 * GIB,
        "memory_cached_bytes": 64 << 10, "memory_dirty_bytes": 8 << 10,
        "swap_total_bytes": 1 << 20, "swap_used_bytes": 624 << 10, "swap_in_bytes_total": 3 * PAGE,
        "swap_out_bytes_total": 4 * PAGE, "page_faults_total": 1000, "major_faults_total": 77,
        "oom_kills_total": 2,
    }  # fmt: skip


def test_what_a_host_does_not_tell_is_left_out(machine: Machine) -> None:
    for name in ("meminfo", "vmstat"):
        (machine.proc / name).unlink()
    (row,) = rows(HostSource, machine)
    assert not [name for name in row if name.startswith(("memory", "swap", "oom"))]
    assert row["num_cpus"] == 2


def test_pressure(machine: Machine) -> None:
    assert rows(PressureSource, machine) == [{
        "cpu_some_us_total": 3698640156, "memory_some_us_total": 32097,
        "memory_full_us_total": 14974, "io_some_us_total": 69743403,
        "io_full_us_total": 51810264,
    }]  # fmt: skip


def test_tcp(machine: Machine) -> None:
    assert rows(TcpSource, machine) == [{
        "connections": 7, "received_segments_total": 1000, "sent_segments_total": 900,
        "retransmitted_segments_total": 12, "received_errors_total": 1, "sent_resets_total": 3,
        "listen_drops_total": 5, "timeouts_total": 6, "lost_retransmits_total": 7,
        "backlog_drops_total": 8,
    }]  # fmt: skip


def test_disks_are_devices_and_counted_once(machine: Machine) -> None:
    assert rows(DiskSource, machine) == [{
        "device": "nvme0n1", "reads_total": 10, "read_bytes_total": 8192, "read_us_total": 30_000,
        "writes_total": 20, "written_bytes_total": 16384, "write_us_total": 60_000,
        "in_flight": 3, "busy_us_total": 70_000,
    }]  # fmt: skip


def test_interfaces(machine: Machine) -> None:
    eth0, lo = sorted(rows(NicSource, machine), key=lambda row: row["interface"])
    assert eth0 == {
        "interface": "eth0", "received_bytes_total": 500, "received_packets_total": 5,
        "received_errors_total": 1, "received_drops_total": 2, "sent_bytes_total": 300,
        "sent_packets_total": 3, "sent_errors_total": 4, "sent_drops_total": 6, "is_up": 1,
        "link_mbps": 25_000, "link_changes_total": 3,
    }  # fmt: skip
    assert lo["interface"] == "lo"
    assert "is_up" not in lo  # "unknown" is neither up nor down
    assert lo["link_mbps"] == -1


def test_an_interface_that_comes_later_is_seen(machine: Machine, tree: Tree) -> None:
    source = NicSource(machine)
    assert len(list(source.sample())) == 2
    tree("proc", {"net/dev": PROC["net/dev"] + "  ib0:40 1 0 0 0 0 0 0 60 1 0 0 0 0 0 0\n"})
    assert {row["interface"] for row in source.sample()} == {"lo", "eth0", "ib0"}


def test_infiniband(machine: Machine, tree: Tree) -> None:
    with pytest.raises(Skipped, match="no adapter, or its driver is not loaded"):
        rows(InfinibandSource, machine)
    tree("sys", INFINIBAND)
    assert rows(InfinibandSource, machine) == [
        {
            "port": "mlx5_0/1", "is_active": 1, "is_link_up": 1, "rate_gbps": 400.0,
            "sent_bytes_total": 4000, "received_bytes_total": 8000, "symbol_errors_total": 3,
            "link_downs_total": 1, "sent_wait_total": 55, "out_of_sequence_total": 8,
            "rnr_retries_total": 9,
        },
        {"port": "mlx5_1/1", "is_active": 0, "is_link_up": 0, "rate_gbps": 2.5},
    ]  # fmt: skip


def test_a_rank_as_a_process(machine: Machine) -> None:
    (row,) = rows(ProcessSource, machine)
    assert row == {
        "rank": 5, "pid": 4711, "user_us_total": 250 * TICK_US, "system_us_total": 50 * TICK_US,
        "rss_bytes": 300 * PAGE, "num_threads": 9, "minor_faults_total": 500,
        "major_faults_total": 6, "swap_bytes": 12 << 10, "voluntary_switches_total": 31,
        "involuntary_switches_total": 4, "read_bytes_total": 4096, "written_bytes_total": 8192,
        "run_delay_us_total": 7000, "stopped_by": 0, "cpus_allowed": 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "stopped_by"),
    [
        ({"cgroups/job/cgroup.events": "populated 1\nfrozen 1\n"}, 3),
        ({"cgroups/job/cgroup.events": "populated 1\nfrozen 0\n"}, 0),
        ({"cgroups/freezer/old/freezer.state": "FROZEN\n"}, 3),
        ({"cgroups/freezer/old/freezer.state": "THAWED\n"}, 0),
        ({"cgroups/cgroup.events": "frozen 1\n", "proc/4711/cgroup": "0::/../job\n"}, 0),
        ({}, 0),
    ],
)
def test_a_frozen_control_group_keeps_a_rank_from_running(
    machine: Machine, tree: Tree, files: dict[str, str], stopped_by: int
) -> None:
    tree(".", {"proc/4711/cgroup": "4:cpu,freezer:/old\n0::/job\n"} | files)
    (row,) = rows(ProcessSource, machine)
    assert row["stopped_by"] == stopped_by


@pytest.mark.parametrize(
    ("overslept", "used_ticks", "stopped_by"),
    [
        (4.0, 100, 4),  # a second of work in five, before it one of each second: it was paused
        (4.0, 400, 0),  # it worked on: the collector was paused alone
        (0.0, 100, 0),  # less work, and no pause
    ],
)
def test_a_rank_that_was_paused_with_its_machine(
    machine: Machine, tree: Tree, overslept: float, used_ticks: int, stopped_by: int
) -> None:
    uptimes = iter((10.0, 11.0, 16.0, 17.0))
    source = ProcessSource(replace(machine, uptime=uptimes.__next__))

    def codes(user_ticks: int) -> list[Any]:
        text = (machine.proc / "4711/stat").read_text()
        head, _, rest = text.rpartition(")")
        words = rest.split()
        words[11] = str(user_ticks)
        tree(".", {"proc/4711/stat": f"{head}) {' '.join(words)}\n"})
        return [row["stopped_by"] for row in source.sample()]

    per_second = os.sysconf("SC_CLK_TCK")
    assert codes(per_second) == codes(2 * per_second) == [0]
    if overslept:
        source.overslept(overslept)
    after = 2 * per_second + used_ticks * per_second // 100
    assert codes(after) == [stopped_by]
    assert codes(after) == [0]  # the next one is as it is


def test_what_a_rank_without_work_did_in_a_pause_is_not_known(machine: Machine) -> None:
    uptimes = iter((10.0, 11.0, 16.0))
    source = ProcessSource(replace(machine, uptime=uptimes.__next__))
    list(source.sample())
    list(source.sample())
    source.overslept(4.0)
    assert [row["stopped_by"] for row in source.sample()] == [0]


def test_a_process_that_a_signal_stopped() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        machine = Machine(ranks=lambda: (RankProcess(0, 0, process.pid),))
        assert rows(ProcessSource, machine)[0]["stopped_by"] == 0
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert rows(ProcessSource, machine)[0]["stopped_by"] == 1
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert rows(ProcessSource, machine)[0]["stopped_by"] == 0
        process.kill()


def test_a_process_that_is_pinned_while_it_runs() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "60"]) as process:
        machine = Machine(ranks=lambda: (RankProcess(0, 0, process.pid),))
        assert rows(ProcessSource, machine)[0]["cpus_allowed"] == len(usable)
        os.sched_setaffinity(process.pid, usable[:1])
        assert rows(ProcessSource, machine)[0]["cpus_allowed"] == 1
        process.kill()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroups/job/cpu.max": "40000 100000\n",
          "cgroups/job/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 5000\n"},
         (5000, 400)),
        ({"cgroups/job/cpu.max": "max 100000\n", "cgroups/job/cpu.stat": "throttled_usec 7\n"},
         (7, 0)),
        ({"proc/4711/cgroup": "4:cpu,cpuacct:/old\n",
          "cgroups/cpu/old/cpu.cfs_quota_us": "150000\n",
          "cgroups/cpu/old/cpu.cfs_period_us": "100000\n",
          "cgroups/cpu/old/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_time 8000000\n"},
         (8000, 1500)),
        ({}, (None, None)),
    ],
    ids=["version 2", "no limit", "version 1", "not known"],
)  # fmt: skip
def test_a_limit_on_processor_time_holds_a_rank_up(
    machine: Machine, tree: Tree, files: dict[str, str], expected: tuple[int | None, int | None]
) -> None:
    tree(".", {"proc/4711/cgroup": "0::/job\n"} | files)
    (row,) = rows(ProcessSource, machine)
    assert (row.get("throttled_us_total"), row.get("cpu_limit_millicores")) == expected


def test_switches_are_of_the_thread_that_trains(machine: Machine, tree: Tree) -> None:
    tree("proc", {
        "4711/task/4712/status": "voluntary_ctxt_switches:\t900\n",
        "4711/task/4712/schedstat": "1 8000 1\n",
    })  # fmt: skip
    machine = replace(machine, ranks=lambda: (RankProcess(0, 5, 4711, 4712),))
    (row,) = rows(ProcessSource, machine)
    assert (row["voluntary_switches_total"], row["run_delay_us_total"]) == (900, 8)


def test_a_rank_that_is_gone_has_no_row(machine: Machine) -> None:
    machine = replace(machine, ranks=lambda: (RankProcess(0, 6, 4712),))
    assert rows(ProcessSource, machine) == []


def test_this_process() -> None:
    cpu_seconds, rss_bytes = ProcessSampler().sample(os.getpid())
    assert 0 < cpu_seconds < time.process_time() + 1
    assert rss_bytes > 1 << 20
    assert ProcessSampler().sample(2**22 + 1) == (0.0, 0)  # above the kernel's highest pid
    (row,) = rows(ProcessSource, Machine(ranks=lambda: (RankProcess(0, 0, os.getpid()),)))
    assert row["open_files"] >= 3
    assert row["num_threads"] >= 1


def version_2(group: str, **files: str) -> dict[str, str]:
    return {f"{group}/{name.replace('_', '.', 1)}": text for name, text in files.items()}


def test_cgroup_version_2_takes_the_nearest_limit(machine: Machine, tree: Tree) -> None:
    tree("proc", {"4711/cgroup": "0::/job/step/task\n", "self/cgroup": "0::/\n"})
    plain = {"memory_current": "5\n", "memory_max": "max\n", "pids_current": "4\n"}
    tree("cgroups", version_2("job/step/task", **plain, cpu_max="max 100000\n",
        cpu_stat="usage_usec 7\n"))  # fmt: skip
    tree("cgroups", version_2(
        "job", memory_current="1000\n", memory_max=f"{8 * GIB}\n", cpu_max="150000 100000\n",
        memory_events="low 0\nhigh 0\nmax 21\noom 2\noom_kill 1\n",
        cpu_stat="usage_usec 900\nnr_periods 50\nnr_throttled 5\nthrottled_usec 333\n",
    ))  # fmt: skip
    assert rows(CgroupSource, machine) == [{
        "cgroup": "/job/step/task", "memory_bytes": 1000, "memory_limit_bytes": 8 * GIB,
        "memory_limit_hits_total": 21, "oom_kills_total": 1, "cpu_us_total": 900,
        "cpu_limit_cores": 1.5, "periods_total": 50, "throttled_periods_total": 5,
        "throttled_us_total": 333, "tasks": 4,
    }]  # fmt: skip


def test_cgroup_without_a_limit_has_that_of_the_machine(machine: Machine, tree: Tree) -> None:
    tree("proc", {"4711/cgroup": "0::/job\n", "self/cgroup": "0::/\n"})
    tree("cgroups", version_2("job", memory_current="5\n", memory_max="max\n",
        memory_events="max 0\noom_kill 0\n", cpu_stat="usage_usec 7\n"))  # fmt: skip
    (row,) = rows(CgroupSource, machine)
    assert (row["memory_limit_bytes"], row["cpu_limit_cores"]) == (16 * GIB, 2)
    assert "throttled_us_total" not in row


def test_cgroup_in_a_container_is_what_is_mounted(machine: Machine, tree: Tree) -> None:
    tree("proc", {"4711/cgroup": "0::/../../kubepods/pod1\n", "self/cgroup": "0::/\n"})
    tree("cgroups", version_2(".", memory_current="5\n", memory_max="4096\n"))
    (row,) = rows(CgroupSource, machine)
    assert (row["memory_bytes"], row["memory_limit_bytes"]) == (5, 4096)


def test_cgroup_version_1(machine: Machine, tree: Tree) -> None:
    lines = "9:memory:/slurm/job1\n4:cpu,cpuacct:/slurm/job1\n8:pids:/\n0::/\n"
    tree("proc", {"4711/cgroup": lines, "self/cgroup": "0::/\n"})
    tree("cgroups", {
        "memory/slurm/job1/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/slurm/job1/memory.usage_in_bytes": f"{GIB}\n",
        "memory/slurm/job1/memory.failcnt": "12\n",
        "memory/slurm/job1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        "cpu/slurm/job1/cpu.cfs_quota_us": "50000\n",
        "cpu/slurm/job1/cpu.cfs_period_us": "100000\n",
        "cpu/slurm/job1/cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 5000000\n",
        "cpuacct/slurm/job1/cpuacct.usage": "77000\n",
        "pids/pids.current": "6\n",
    })  # fmt: skip
    assert rows(CgroupSource, machine) == [{
        "cgroup": "/slurm/job1", "memory_bytes": GIB, "memory_limit_bytes": 2 * GIB,
        "memory_limit_hits_total": 12, "oom_kills_total": 3, "cpu_us_total": 77,
        "cpu_limit_cores": 0.5, "periods_total": 10, "throttled_periods_total": 4,
        "throttled_us_total": 5000, "tasks": 6,
    }]  # fmt: skip


def test_a_kill_for_memory_is_told_when_it_is_counted(machine: Machine, tree: Tree) -> None:
    told: list[News] = []
    machine = replace(machine, report=told.append)
    tree("proc", {"4711/cgroup": "0::/job\n", "self/cgroup": "0::/\n"})
    files = version_2("job", memory_current="5\n", memory_max="4096\n")
    tree("cgroups", files | {"job/memory.events": "oom_kill 1\n"})
    source = CgroupSource(machine)
    source.open()
    assert told == []  # the one before our time
    tree("cgroups", {"job/memory.events": "oom_kill 3\n"})
    source.sample()
    fields = {"cgroup": "/job", "count": "2", "seen_in": "cgroup"}
    assert [(news.name, news.fields) for news in told] == [("oom kill", fields)]


# of `dmesg` of several hosts, as /dev/kmsg gives them
KERNEL_LINES = {
    "xid": "NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, name=python3, Ch 00000008, intr 00000000",
    "switch xid": "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46",
    "oom kill": "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB",
    "task hung": "INFO: task python:4711 blocked for more than 122 seconds.",
    "segmentation fault": "python[4711]: segfault at 0 ip 00007f1 sp 00007ff error 4 in libc.so",
    "hardware error": "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400",
    "link down": "mlx5_core 0000:5e:00.0 eth2: Link is Down",
}


@pytest.fixture
def log(machine: Machine) -> tuple[KernelLogSource, list[News], Callable[[str], None]]:
    """A source that follows a pipe in place of /dev/kmsg, what it tells, and a writer."""
    os.mkfifo(machine.kernel_log)
    told: list[News] = []
    source = KernelLogSource(replace(machine, report=told.append))
    source.open()
    writer = os.open(machine.kernel_log, os.O_WRONLY)

    def write(text: str) -> None:
        os.write(writer, text.encode())

    return source, told, write


@pytest.mark.parametrize("name", KERNEL_LINES)
def test_the_kernel_log(name: str, log: Any) -> None:
    source, told, write = log
    now_us = time.monotonic_ns() // 1000
    write(f"6,1233,{now_us},-;something else, pid=1\n")
    write(f"4,1234,{now_us - 5_000_000},-;{KERNEL_LINES[name]}\n SUBSYSTEM=pci\n DEVICE=x\n")
    source.sample()
    source.sample()
    (news,) = told
    assert news.name == name
    assert news.fields["text"] == KERNEL_LINES[name]
    assert 4e9 < time.time_ns() - news.time_ns < 60e9
    assert (news.rank == 5) == ("4711" in KERNEL_LINES[name])
    if name == "xid":
        assert (news.fields["number"], news.fields["pci"]) == ("31", "0000:1b:00")
        assert news.fields["meaning"].startswith("GPU memory page fault")


def test_an_xid_of_an_unknown_process(log: Any) -> None:
    source, told, write = log
    text = "NVRM: Xid (PCI:0000:06:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
    write(f"4,1,0,-;{text}\n")
    source.sample()
    assert (told[0].fields["number"], told[0].rank) == ("79", -1)
    assert "pid" not in told[0].fields


def test_a_storm_of_messages_is_bounded_and_counted(log: Any) -> None:
    source, told, write = log
    for _ in range(100):
        write(f"4,1,0,-;{KERNEL_LINES['xid']}\n")
    source.sample()
    assert len(told) == 60
    assert source._limiter.suppressed == 40


def test_a_limiter_says_what_it_suppressed() -> None:
    now = [0.0]
    limiter = Limiter(2, 60.0, lambda: now[0])
    assert [limiter.passes() for _ in range(5)] == [True, True, False, False, False]
    now[0] = 61.0
    assert limiter.passes()
    assert (limiter.take_suppressed(), limiter.take_suppressed()) == (3, 0)


JOURNAL = """#!/bin/sh
if ! test -e "{marker}"; then
    echo "No journal files were opened due to insufficient permissions." >&2
    exit 1
fi
echo '{{"MESSAGE":"{text}","__REALTIME_TIMESTAMP":"1700000000000000"}}'
exec sleep 60
"""


def follow(source: KernelLogSource, told: list[News]) -> None:
    """Sample until there is news, at most 10 s."""
    source.open()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        source.sample()
        time.sleep(0.01)


@pytest.mark.parametrize("may_read", [True, False])
def test_without_the_kernel_log_the_journal_is_followed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_read: bool
) -> None:
    if may_read:
        (tmp_path / "marker").touch()
    program = tmp_path / "bin/journalctl"
    program.parent.mkdir()
    program.write_text(JOURNAL.format(marker=tmp_path / "marker", text=KERNEL_LINES["xid"]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    told: list[News] = []
    source = KernelLogSource(replace(machine, report=told.append))
    try:
        if may_read:
            follow(source, told)
            assert (told[0].name, told[0].time_ns) == ("xid", 1_700_000_000 * 10**9)
        else:
            with pytest.raises(Skipped, match=r"insufficient permissions"):
                follow(source, told)
    finally:
        source.close()


def test_neither_log_is_skipped_with_the_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Skipped, match="No such file or directory; there is no journalctl either"):
        KernelLogSource(machine).open()


def test_the_real_kernel_log_can_be_followed_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # the log alone, no journal
    (found,) = [one for one in describe() if one.name == "kernel-log"]
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        state, reason = "works", ""
    except OSError as error:
        state, reason = "skipped", f"/dev/kmsg: {error.strerror}"
    assert found.state == state
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.name)
def test_a_machine_without_anything_is_skipped_with_a_reason(
    make: type[SampleSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    nothing = tmp_path / "nothing"
    machine = Machine(nothing, nothing, nothing, nothing, nothing)
    if make.lane == "driver":
        pynvml = pytest.importorskip("pynvml")
        try:
            pynvml.nvmlInit()
            pytest.skip("this machine has a driver")
        except pynvml.NVMLError:
            pass
    with pytest.raises(Skipped, match=r"nothing|NVML"):
        make(machine).open()


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.name)
def test_every_source_is_documented(make: type[SampleSource]) -> None:
    assert f"| `{make.name}` |" in DOCS
    assert make.__doc__


def test_sources_and_kinds_match_and_every_column_is_documented() -> None:
    names = [make.name for make in SOURCES]
    assert len(set(names)) == len(names)
    assert {make.kind for make in SOURCES} - {None} == set(SAMPLE_COLUMNS) == set(SAMPLE_KEYS)
    for columns in SAMPLE_COLUMNS.values():
        assert len(set(columns)) == len(columns) <= 64
        assert not [column for column in columns if f"`{column}`" not in DOCS]
    assert {key for keys in SAMPLE_KEYS.values() for key in keys} >= SAMPLE_STRING_COLUMNS


def test_describe_says_of_each_source_whether_it_works_here(machine: Machine) -> None:
    found = {one.name: one for one in describe()}
    assert set(found) == {make.name for make in SOURCES}
    assert found["host"].state == "works"
    assert "1 row, " in found["host"].reason
    assert all(one.reason for one in found.values())
    (machine.proc / "stat").write_text("cpu 1 2 x\n")
    broken = {one.name: one for one in describe(machine)}
    assert broken["host"].state == "fails"
    assert broken["host"].reason.startswith("ValueError")
    assert broken["tcp"].state == "works"


def test_rows_of_this_machine_hold_only_columns_of_their_kind() -> None:
    machine = Machine(ranks=lambda: (RankProcess(0, 0, os.getpid()),))
    for make in SOURCES:
        source = make(machine)
        try:
            source.open()
            for row in source.sample():
                assert make.kind is not None
                assert row.keys() <= set(SAMPLE_COLUMNS[make.kind])
        except Skipped:
            continue
        finally:
            source.close()
