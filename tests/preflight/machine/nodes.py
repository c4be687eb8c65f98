"""Runs of a few like nodes, healthy in what the machine families look at, for one to be changed."""

from __future__ import annotations

from typing import Any

import msgspec

from rankscope.preflight.checks.base import Check, Run
from rankscope.preflight.facts.gpu import Gpu, GpuFacts, GpuPair, NvLink
from rankscope.preflight.facts.gpu_host import GpuHostFacts
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.facts.limits import LimitFacts
from rankscope.preflight.facts.rdma import Gid, RdmaFacts, RdmaPort
from rankscope.preflight.facts.script import ScriptFacts
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.facts.software import DataFacts, SoftwareFacts
from rankscope.preflight.facts.storage import Folder, Locked, StorageFacts, Written
from rankscope.preflight.model import CheckFinding, Facts, NodeReport
from rankscope.preflight.options import Options

GIB = 1 << 30
OPTIONS = Options(
    checkpoint_dir="/ckpt", checkpoint_gb=100, script="/job/train.py", data_dir="/data",
    num_loader_workers=4, tier="deep",
)  # fmt: skip

LIMITS = LimitFacts(
    nofile_soft=65536, nofile_hard=1048576, memlock_soft_bytes=-1, may_lock_memory=False,
    nproc_soft=100_000, num_user_tasks=400, shm_total_bytes=64 * GIB, shm_free_bytes=63 * GIB,
    memory_total_bytes=512 * GIB, memory_available_bytes=480 * GIB, swap_used_bytes=0,
    num_cores=64, governor="performance", huge_pages="madvise", numa_balancing=0, num_numa_nodes=2,
)  # fmt: skip
SOFTWARE = SoftwareFacts(
    has_torch=True, torch="2.13.0+cu126", torch_cuda="12.6", torch_git="cf30153c4c13",
    nccl="2.27.3", packages={"torch": "2.13.0", "numpy": "2.4.6", "nvidia-nccl-cu12": "2.27.3"},
    packages_digest="aa", python="3.11.7", kernel="6.8.0", libc="glibc 2.39",
    script=ScriptFacts(path="/job/train.py", digest="11" * 32, package_digest="22" * 32,
                       num_files=3),
    data=DataFacts(path="/data", count=1000, bytes=10**9, digest="33" * 32),
)  # fmt: skip
HOST = HostFacts(hostname="h", kernel="6.8.0")


def gpu(index: int) -> Gpu:
    """Return a healthy H100 at rest."""
    return Gpu(
        index=index, name="NVIDIA H100 80GB HBM3", uuid=f"GPU-{index}", bus_id=f"0:{index}:0",
        memory_total_bytes=80 * GIB, memory_used_bytes=4 << 20, ecc=True, ecc_uncorrected=0,
        rows_pending=False, rows_failed=False, recovery_action="none", clock_reasons=1,
        sm_clock_max_mhz=1980, power_limit_mw=700_000, temperature_c=34, persistence=True,
        mig=False, compute_mode="default", pcie_width=16, pcie_width_max=16, pcie_generation=1,
        pcie_generation_max=5, fabric_state="completed", fabric_health=0b101010,
        links=tuple(NvLink(number=number) for number in range(18)),
    )  # fmt: skip


GPUS = GpuFacts(
    num_gpus=2, count=2, driver="570.86.15", cuda_driver="12.8", gpus=(gpu(0), gpu(1)),
    pairs=(GpuPair(first=0, second=1, level=50, p2p="ok"),),
    host=GpuHostFacts(num_on_bus=2, has_kernel_driver=True, is_open_driver=True, num_acs_bridges=0),
)  # fmt: skip
PORT = RdmaPort(
    device="mlx5_0", number=1, state="ACTIVE", phys_state="LinkUp", rate_gbit=400,
    rate="400 Gb/sec (4X NDR)", link_layer="Ethernet", interface_mtu_bytes=9000,
    gids=(Gid(index=2, gid="0000:0000:0000:0000:0000:ffff:0a00:0001", kind="IB/RoCE v1"),
          Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0001", kind="RoCE v2")),
)  # fmt: skip
RDMA = RdmaFacts(ports=(PORT,), verbs={"mlx5_0": ""}, has_library=True)


def storage(node: str, names: list[str]) -> StorageFacts:
    """Return what a node sees in a directory that all share."""
    nas = {"mounted_at": "/ckpt", "mount_source": "nas:/x", "file_system": "nfs4"}
    room = {"is_directory": True, "is_writable": True, "total_bytes": 10**13, "free_bytes": 10**12}
    local = {"mounted_at": "/", "mount_source": "/dev/sda1", "file_system": "ext4"}
    return StorageFacts(
        folders=(
            msgspec.convert({"role": "checkpoint", "path": "/ckpt", **room, **nas}, Folder),
            msgspec.convert({"role": "data", "path": "/data", **room, **nas}, Folder),
            msgspec.convert({"role": "TMPDIR", "path": "/tmp", **room, **local}, Folder),
            Folder(role="HF_HOME", path="/scratch/hf", error="ENOENT: No such file or directory"),
        ),
        written=Written(written_bytes=64 << 20, elapsed_s=0.2),
        locked=Locked(),
        token=f"token of {node}",
        seen={name: f"token of {name}" for name in names},
    )


def healthy(count: int = 3, backend: str = "nccl", nproc: int = 2) -> Run:
    """Return a run of like nodes with two GPUs each."""
    names = [f"node{number}" for number in range(count)]
    reports = {
        name: NodeReport(
            node=name,
            node_rank=number,
            stage="done",
            options=OPTIONS,
            facts=Facts(
                launch=LaunchFacts(nproc_per_node=nproc),
                host=HOST,
                limits=LIMITS,
                storage=storage(name, names),
                software=SOFTWARE,
                gpu=GPUS,
                rdma=RDMA,
                smoke=SmokeFacts(backend=backend, stage="done", backends=("gloo", "nccl")),
            ),
        )
        for number, name in enumerate(names)
    }
    return Run("r", tuple(names), reports, msgspec.structs.replace(OPTIONS, backend=backend))


def changed(run: Run, node: str, part: str, **fields: Any) -> Run:
    """Return the run with fields of one node's facts set; a field of None forgets the part."""
    report = run.reports[node]
    facts = getattr(report.facts, part)
    new = msgspec.structs.replace(facts, **fields) if fields else None
    of_node = msgspec.structs.replace(report.facts, **{part: new})
    reports = {**run.reports, node: msgspec.structs.replace(report, facts=of_node)}
    return Run(run.run_id, run.expected, reports, run.options)


def changed_gpu(run: Run, node: str, index: int = 0, **fields: Any) -> Run:
    """Return the run with one GPU of a node changed."""
    facts = run.reports[node].facts.gpu
    assert facts is not None
    gpus = tuple(
        msgspec.structs.replace(one, **fields) if one.index == index else one for one in facts.gpus
    )
    return changed(run, node, "gpu", gpus=gpus)


def asked(run: Run, **options: Any) -> Run:
    """Return the run with other options."""
    return Run(
        run.run_id, run.expected, run.reports, msgspec.structs.replace(run.options, **options)
    )


def loud(check: Check, run: Run) -> list[CheckFinding]:
    """Return what a check fails or warns of; every finding must be whole."""
    found = list(check.evaluate(run))
    for finding in found:
        assert finding.id == check.id
        assert finding.title
        assert "\n" not in finding.title
        if finding.status in ("fail", "warn"):
            assert finding.impact
            assert finding.unless
            assert finding.nodes
            assert finding.fix or len(finding.nodes) > 1
            assert all(fix.command.strip() for fix in finding.fix)
            assert {fix.node for fix in finding.fix} <= set(run.reports)
    return [finding for finding in found if finding.status in ("fail", "warn")]
