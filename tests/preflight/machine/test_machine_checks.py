"""Every check of the machine families: a healthy run yields nothing, and a fault yields one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Check, Run
from rankscope.preflight.facts.caches import Cache
from rankscope.preflight.facts.gpu import Burn, GpuPair, GpuProcess, NvLink
from rankscope.preflight.facts.gpu_host import GpuHostFacts, Xid
from rankscope.preflight.facts.limits import CgroupFacts
from rankscope.preflight.facts.software import Library
from rankscope.preflight.facts.storage import Folder, Locked, Written
from rankscope.preflight.model import Trouble
from tests.preflight.machine.nodes import (
    GIB,
    GPUS,
    PORT,
    SOFTWARE,
    asked,
    changed,
    changed_gpu,
    healthy,
    loud,
)  # fmt: skip

Change = Callable[[Run], Run]
NAMES = ("limits", "storage", "software", "gpu", "rdma")
CHECKS: dict[str, Check] = {check.id: check for name in NAMES for check in FAMILIES[name]}
MIB = 1 << 20
SCRIPT, DATA = SOFTWARE.script, SOFTWARE.data
CHECKPOINT = Folder(
    role="checkpoint", path="/ckpt", is_directory=True, is_writable=True, free_bytes=10**12,
    total_bytes=10**13, file_system="nfs4", mount_source="nas:/x", mounted_at="/ckpt",
)  # fmt: skip
XID = Xid(number=79, bus_id="0000:01:00", count=2)
SLOW = tuple(Burn(index=i, uuid=f"GPU-{i}", bf16_tflops=t) for i, t in enumerate((790, 500)))
BURNS = tuple(Burn(index=i, uuid=f"GPU-{i}", bf16_tflops=790, copy_gb_per_s=50) for i in range(2))


def folders(run: Run, **fields: object) -> tuple[Folder, ...]:
    facts = run.reports["node1"].facts.storage
    assert facts is not None
    return (msgspec.structs.replace(CHECKPOINT, **fields), *facts.folders[1:])


def on(part: str, **fields: object) -> Change:
    return lambda run: changed(run, "node1", part, **fields)


def gpu_is(**fields: object) -> Change:
    return lambda run: changed_gpu(run, "node1", **fields)


def script_is(**fields: object) -> Change:
    return on("software", script=msgspec.structs.replace(SCRIPT, **fields))


def folder_is(**fields: object) -> Change:
    return lambda run: changed(run, "node1", "storage", folders=folders(run, **fields))


def host_of_gpus(**fields: object) -> Change:
    return on("gpu", host=msgspec.structs.replace(GPUS.host, **fields))


def port_is(**fields: object) -> Change:
    return on("rdma", ports=(msgspec.structs.replace(PORT, **fields),))


def alone_in_storage(run: Run) -> Run:
    run = changed(run, "node1", "storage", seen={"node1": "token of node1"})
    for node in ("node0", "node2"):
        facts = run.reports[node].facts.storage
        assert facts is not None
        assert facts.seen is not None
        seen = {name: token for name, token in facts.seen.items() if name != "node1"}
        run = changed(run, node, "storage", seen=seen)
    return run


def burnt(run: Run) -> Run:
    for node in run.reports:
        run = changed(run, node, "gpu", burns=BURNS)
    return run


FAULTS = [
    # id, change of node1, status, words of the title
    ("lim.nofile", on("limits", nofile_soft=64, nofile_hard=1048576), "fail", "64 open files"),
    ("lim.nofile", on("limits", nofile_soft=1024, nofile_hard=1024), "warn", "4096 wanted"),
    ("lim.memlock", on("limits", memlock_soft_bytes=64 << 10), "fail", "64 KiB"),
    ("lim.address", on("limits", address_soft_bytes=600_000_000), "fail", "0.6 GiB of addresses"),
    ("lim.address", on("limits", address_soft_bytes=64 * GIB), "warn", "64.0 GiB of addresses"),
    ("lim.nproc", on("limits", nproc_soft=420), "warn", "20 more tasks allowed by ulimit -u"),
    ("lim.nproc", on("limits", cgroup=CgroupFacts(pids_max=100, pids_now=90)), "warn", "pids.max"),
    ("lim.shm", on("limits", shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB), "fail", "64 MiB"),
    ("lim.shm", on("limits", shm_free_bytes=GIB), "warn", "1024 MiB free"),
    ("lim.cgroup.mem", on("limits", memory_available_bytes=20 * GIB), "warn", "20.0 GiB of 512.0"),
    ("lim.cgroup.mem",
     on("limits", cgroup=CgroupFacts(memory_limit_bytes=100 * GIB, memory_used_bytes=GIB)),
     "warn", "may use 100 GiB"),
    ("lim.cgroup.cpu", on("limits", cgroup=CgroupFacts(cpu_cores=1.5)), "warn", "1.5 cores"),
    ("lim.cgroup.cpu", on("limits", num_cores=1), "warn", "affinity"),
    ("sys.perf", on("limits", governor="powersave"), "warn", "governor"),
    ("sys.perf", on("limits", numa_balancing=1), "warn", "NUMA balancing"),
    ("fs.hang", folder_is(is_hung=True, error="no answer in 3 s"), "fail", "no answer in 3 s"),
    ("fs.hang", folder_is(error="ESTALE: Stale file handle"), "fail", "Stale"),
    ("fs.free", folder_is(free_bytes=10**10), "fail", "10.0 GB free, 100 GB wanted"),
    ("fs.free", folder_is(error="ENOENT: No such file or directory"), "fail", "ENOENT"),
    ("fs.free", folder_is(total_inodes=10**6, free_inodes=3), "warn", "3 inodes free"),
    ("fs.cache", on("storage", caches=(Cache(variable="HF_HOME", path="/hf", closed="x is on a "
     "read-only mount"),)), "warn", "no cache can be written: HF_HOME"),
    ("fs.shared", alone_in_storage, "fail", "another directory there"),
    ("fs.same", folder_is(file_system="ext4"), "warn", "a local disk"),
    ("fs.write", folder_is(is_read_only=True), "fail", "Read-only"),
    ("fs.write", on("storage", written=Written(error="EDQUOT: Disk quota exceeded")), "fail",
     "quota"),
    ("fs.write", on("storage", written=Written(written_bytes=8 * MIB, elapsed_s=4.0)), "warn",
     "writes 2 MB/s"),
    ("fs.write", on("storage", written=Written(is_hung=True, error="x")), "warn", "did not take"),
    ("fs.lock", on("storage", locked=Locked(fcntl="ENOLCK: No locks available")), "warn",
     "fcntl ENOLCK"),
    ("fs.lock", on("storage", locked=Locked(is_hung=True, error="x")), "warn", "no lock in 3 s"),
    ("sw.drift", on("software", torch="2.12.1+cu126"), "fail", "torch 2.12.1+cu126"),
    ("sw.drift", on("software", torch="2.13.1+cu126"), "warn", "torch 2.13.1+cu126"),
    ("sw.drift", on("software", torch_cuda="13.0"), "fail", "CUDA 13.0"),
    ("sw.drift", on("software", nccl="2.26.1"), "fail", "NCCL 2.26.1"),
    ("sw.drift", on("software", python="3.12.1"), "fail", "Python 3.12.1"),
    ("sw.drift", on("software", python="3.11.9"), "warn", "Python 3.11.9"),
    ("sw.drift", on("software", kernel="6.5.0", libc="glibc 2.31"), "warn", "kernel 6.5.0"),
    ("sw.drift", on("software", packages={**SOFTWARE.packages, "numpy": "1.26.4"}), "warn",
     "numpy 1.26.4, not 2.4.6"),
    ("sw.drift", on("software", packages_digest="bb"), "warn", "other Python packages"),
    ("sw.drift", on("gpu", driver="550.54.15"), "warn", "NVIDIA driver 550.54.15"),
    ("sw.drift", on("software", has_torch=False, torch="", torch_cuda="", nccl="", torch_git=""),
     "fail", "torch is not installed"),
    ("sw.script", script_is(digest="44" * 32), "fail", "the script"),
    ("sw.script", script_is(package_digest="44" * 32), "fail", "a module beside"),
    ("sw.script", script_is(digest="", error="No such file or directory: /job/train.py"), "fail",
     "No such file"),
    ("sw.script", script_is(import_errors={"apex": "ModuleNotFoundError: No module named 'apex'"}),
     "fail", "cannot import apex"),
    ("sw.data", on("software", data=msgspec.structs.replace(DATA, count=999, digest="5")), "warn",
     "999 files"),
    ("sw.nccl.multi",
     on("software", libraries=(Library(path="/opt/libnccl.so.2", version="2.19.3",
                                       found_by="LD_LIBRARY_PATH"),)),
     "warn", "2.19.3 by LD_LIBRARY_PATH"),
    ("sw.driver", on("gpu", cuda_driver="11.8"), "fail", "CUDA 11.8"),
    ("sw.driver", on("gpu", cuda_driver="12.2"), "warn", "CUDA 12.2"),
    ("sw.driver", on("software", torch_cuda=""), "fail", "without CUDA"),
    ("sw.container", on("host", container="docker"), "warn", "docker, the others: no container"),
    ("sw.backend", on("smoke", backends=("gloo",)), "fail", "without nccl"),
    ("gpu.count", on("gpu", num_gpus=1), "fail", "1 GPUs for 2 ranks"),
    ("gpu.count", on("gpu", problem="NVML: Driver/library version mismatch"), "fail", "mismatch"),
    ("gpu.count", on("gpu", lost={"1": "GPU is lost"}), "fail", "GPU 1: GPU is lost"),
    ("gpu.count", on("gpu", num_gpus=1, visible="0,7", invisible="7"), "fail", "there is no GPU 7"),
    ("gpu.busy", gpu_is(memory_used_bytes=40 * GIB,
                        processes=(GpuProcess(pid=4711, name="python old.py"),)),
     "fail", "pid 4711 (python old.py)"),
    ("gpu.busy", gpu_is(memory_used_bytes=40 * GIB), "fail", "not to be seen"),
    ("gpu.ecc", gpu_is(ecc_uncorrected=3), "fail", "3 uncorrected"),
    ("gpu.ecc", gpu_is(rows_pending=True), "fail", "waits for a reset"),
    ("gpu.ecc", gpu_is(rows_failed=True), "fail", "remapping of a bad memory row failed"),
    ("gpu.ecc", gpu_is(pages_pending=True), "fail", "page waits"),
    ("gpu.recovery", gpu_is(recovery_action="gpu reset"), "fail", "gpu reset"),
    ("gpu.recovery", gpu_is(errors={"nvmlDeviceGetMemoryInfo": "GPU is lost"}), "fail", "is lost"),
    ("gpu.recovery", host_of_gpus(xids=(XID,)), "warn", "Xid 79"),
    ("gpu.clock", gpu_is(clock_reasons=0x40, temperature_c=92), "fail", "92 C"),
    ("gpu.clock", gpu_is(clock_reasons=0x20), "warn", "thermal"),
    ("gpu.clock", gpu_is(power_limit_mw=300_000), "warn", "power limit is 300 W"),
    ("gpu.clock", gpu_is(mig=True), "warn", "MIG is on"),
    ("gpu.pcie", gpu_is(pcie_width=8), "warn", "PCIe x8 of x16"),
    ("gpu.nvlink", gpu_is(links=(NvLink(number=0, is_active=False), *GPUS.gpus[0].links[1:])),
     "fail", "17 of 18"),
    ("gpu.nvlink", gpu_is(links=(NvLink(number=0, errors={"recovery": 2}),
                                 *GPUS.gpus[0].links[1:])), "warn", "NVLink 0 had to be"),
    ("gpu.nvlink", gpu_is(fabric_state="in progress"), "fail", "in progress"),
    ("gpu.nvlink", gpu_is(fabric_health=0b101001), "fail", "degraded bandwidth"),
    ("gpu.nvlink", on("gpu", pairs=(GpuPair(first=0, second=1, level=30, p2p="ok"),)), "warn",
     "wired otherwise"),
    ("gpu.p2p", on("gpu", pairs=(GpuPair(first=0, second=1, level=50, p2p="chipset"),)), "warn",
     "cannot reach each other"),
    ("gpu.p2p", host_of_gpus(is_open_driver=False), "warn", "nvidia_peermem"),
    ("gpu.burn", lambda run: changed(burnt(run), "node1", "gpu", burns=SLOW), "warn", "500 TFLOP"),
    ("gpu.burn", lambda run: changed(burnt(run), "node1", "gpu",
                                     burns=(Burn(index=0, error="CUDA error: ECC"),)),
     "fail", "CUDA error"),
    ("gpu.burn", lambda run: changed(
        burnt(run), "node1", "gpu",
        burns=(Burn(index=0, uuid="GPU-0", bf16_tflops=790, is_correct=False),)),
     "fail", "in two ways"),
    ("gpu.pcie", lambda run: changed(
        burnt(run), "node1", "gpu",
        burns=(Burn(index=0, uuid="GPU-0", pcie_generation=3, copy_gb_per_s=12),)),
     "warn", "generation 3 of 5 under load"),
    ("ib.port", port_is(state="DOWN", phys_state="Polling"), "fail", "DOWN/Polling"),
    ("ib.port", port_is(state="INIT"), "fail", "INIT"),
    ("ib.port", port_is(rate_gbit=100, rate="100 Gb/sec (1X NDR)"), "fail", "slower"),
    ("ib.port", on("rdma", ports=()), "fail", "active RDMA ports: 0"),
    ("ib.gid", on("rdma", gid_index=2), "fail", "RoCE v1, not RoCE v2"),
    ("ib.gid", on("rdma", gid_index=9), "fail", "names no address"),
    ("ib.gid", port_is(gids=PORT.gids[:1]), "fail", "no address of the kind RoCE v2"),
    ("ib.user", on("rdma", verbs={"mlx5_0": "EACCES: /dev/infiniband/uverbs0"}), "fail", "EACCES"),
    ("ib.user", on("rdma", has_library=False), "fail", "libibverbs"),
    ("ib.user", port_is(errors_during={"symbol_error": 7}), "warn", "symbol_error +7"),
    ("ib.user", port_is(interface_mtu_bytes=1500), "warn", "1500 bytes"),
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize("id", CHECKS)
def test_a_healthy_run_yields_nothing(id: str, count: int) -> None:
    run = burnt(healthy(count))
    assert list(CHECKS[id].evaluate(run)) == []


@pytest.mark.parametrize(
    ("id", "change", "status", "words"), FAULTS, ids=[f"{row[0]}-{row[3]}" for row in FAULTS]
)
def test_a_fault_is_found_at_its_node(id: str, change: Change, status: str, words: str) -> None:
    found = loud(CHECKS[id], change(healthy(3)))
    assert [(one.status, one.nodes) for one in found] == [(status, ("node1",))]
    assert words in found[0].title


@pytest.mark.parametrize(
    ("id", "change", "status", "words"), FAULTS, ids=[f"{row[0]}-{row[3]}" for row in FAULTS]
)
def test_a_fault_makes_no_other_check_accuse_another_node(
    id: str,
    change,
    status: str,
    words: str,
) -> None:
    run = change(healthy(3))
    accused = {n for check in CHECKS.values() for f in loud(check, run) for n in f.nodes}
    assert accused <= {"node1"}


def test_every_check_has_a_fault() -> None:
    assert {row[0] for row in FAULTS} == set(CHECKS)


@pytest.mark.parametrize("id", CHECKS)
def test_what_was_not_measured_is_not_healthy(id: str) -> None:
    run = healthy(3)
    for part in ("limits", "storage", "software", "gpu", "rdma", "host", "smoke"):
        run = changed(run, "node1", part)
    report = msgspec.structs.replace(
        run.reports["node1"],
        troubles=(Trouble(part="limits", status="unknown", reason="not measured: no answer"),),
    )
    run = Run(run.run_id, run.expected, {**run.reports, "node1": report}, run.options)
    found = list(CHECKS[id].evaluate(burnt_others(run)))
    assert {one.status for one in found} <= {"unknown", "skipped"}
    assert any("node1" in (*one.nodes, one.title) for one in found)


def burnt_others(run: Run) -> Run:
    for node in ("node0", "node2"):
        run = changed(run, node, "gpu", burns=BURNS)
    return run


@pytest.mark.parametrize(("launcher", "is_bound"), [("mpi", True), ("slurm", True), ("env", False)])
def test_a_core_for_each_rank_is_enough_where_the_launcher_binds_them(
    launcher: str, is_bound: bool
) -> None:
    run = changed(healthy(3), "node1", "launch", launcher=launcher, local_rank=0)
    run = changed(run, "node1", "limits", num_cores=1)
    assert len(loud(CHECKS["lim.cgroup.cpu"], run)) == (0 if is_bound else 1)
    run = changed(run, "node1", "limits", cgroup=CgroupFacts(cpu_cores=1.5))  # of the whole node
    assert len(loud(CHECKS["lim.cgroup.cpu"], run)) == 1


def test_the_same_limit_on_all_nodes_is_one_finding() -> None:
    run = healthy(3)
    for node in run.reports:
        run = changed(run, node, "limits", nofile_soft=1024, nofile_hard=1048576)
    (found,) = loud(CHECKS["lim.nofile"], run)
    assert found.nodes == ("node0", "node1", "node2")
    assert {fix.command for fix in found.fix} == {"ulimit -n 65536"}


def test_the_remedy_of_a_limit_depends_on_the_box() -> None:
    run = changed(healthy(3), "node1", "limits", nofile_soft=64, nofile_hard=64)
    (found,) = loud(CHECKS["lim.nofile"], run)
    assert "prlimit" in found.fix[0].command
    run = changed(run, "node1", "host", container="docker")
    (found,) = loud(CHECKS["lim.nofile"], run)
    assert found.fix[0].command.startswith("docker run --ulimit nofile=65536:65536")


def test_two_nodes_with_directories_of_their_own_are_both_told() -> None:
    run = healthy(2)
    for node in run.reports:
        run = changed(run, node, "storage", seen={node: f"token of {node}"})
    (found,) = loud(CHECKS["fs.shared"], run)
    assert found.nodes == ("node0", "node1")
    assert "of its own on each of 2 nodes" in found.title


def test_a_directory_seen_one_way_is_shared() -> None:
    run = healthy(3)
    run = changed(run, "node1", "storage", seen={"node1": "token of node1"})  # its cache is stale
    assert loud(CHECKS["fs.shared"], run) == []


def test_old_files_of_another_run_prove_nothing() -> None:
    run = healthy(2)
    run = changed(run, "node0", "storage", seen={"node0": "token of node0", "node1": "old"})
    run = changed(run, "node1", "storage", seen={"node1": "token of node1", "node0": "old"})
    assert [one.status for one in loud(CHECKS["fs.shared"], run)] == ["fail"]


def test_two_nodes_that_differ_accuse_nobody_alone() -> None:
    run = changed(healthy(2), "node1", "software", torch="2.12.0+cu126")
    (found,) = loud(CHECKS["sw.drift"], run)
    assert found.nodes == ("node0", "node1")
    assert found.fix == ()


def test_newer_minor_cuda_with_a_compat_package_is_silent() -> None:
    run = changed(healthy(3), "node1", "gpu", cuda_driver="11.8")
    run = changed(run, "node1", "software", has_cuda_compat=True)
    assert loud(CHECKS["sw.driver"], run) == []


def test_a_cpu_cluster_has_no_gpu_findings() -> None:
    run = healthy(3, backend="gloo")
    for node in run.reports:
        run = changed(run, node, "gpu", num_gpus=0, count=0, gpus=(), pairs=(),
                      absence="NVML: NVML Shared Library Not Found", driver="", cuda_driver="",
                      host=GpuHostFacts())  # fmt: skip
    for check in FAMILIES["gpu"]:
        assert loud(check, run) == []
    assert [one.status for one in CHECKS["gpu.count"].evaluate(run)] == ["skipped"]


def test_a_driver_that_fails_is_told_although_nobody_has_gpus() -> None:
    run = healthy(2, backend="gloo")
    for node in run.reports:
        run = changed(run, node, "gpu", num_gpus=0, count=0, gpus=(), pairs=())
    run = changed(run, "node1", "gpu", problem="NVML: Driver/library version mismatch")
    (found,) = loud(CHECKS["gpu.count"], run)
    assert found.nodes == ("node1",)


def test_a_denied_kernel_log_is_unknown() -> None:
    run = host_of_gpus(xid_problem="the kernel log cannot be read: denied")(healthy(3))
    assert [one.status for one in CHECKS["gpu.recovery"].evaluate(run)] == ["unknown"]


def test_an_xid_of_a_program_says_nothing_of_the_gpu() -> None:
    run = host_of_gpus(xids=(Xid(number=31, bus_id="0", count=9),))(healthy(3))
    assert loud(CHECKS["gpu.recovery"], run) == []


def test_options_decide_what_applies() -> None:
    run = asked(healthy(3), data_dir="")
    assert [one.status for one in CHECKS["sw.data"].evaluate(run)] == ["skipped"]
