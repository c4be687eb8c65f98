"""What ranks say of where they run: versions, variables, and one rank or host that is unlike."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.wire import schema
from tests.simulator.job import Job
from tests.simulator.told import START_NS, Item

_FACTS = {
    "python": "3.12.4", "torch": "2.13.0", "torch.cuda": "13.0", "nccl": "2.27.5",
    "cudnn": "91000", "driver": "NVRM 570.86.10", "gpu.model": "H100", "kernel": "5.15.0-105",
    "host.cpus": "128", "env.NCCL_SOCKET_IFNAME": "eth0", "env.OMP_NUM_THREADS": "8",
}  # fmt: skip
_MEMORY_BYTES = 8 << 30
DRIFTED = ("nccl", "2.27.3")  # what a fault of kind "drift" gives all ranks of a host


def environments(job: Job) -> Iterator[Item]:
    """Yield the snapshot of every rank, with what differs by rank and host in healthy jobs."""
    odd = {fault.host for fault in job.faults if fault.kind == "drift"}
    for rank in range(job.num_ranks):
        host = rank // job.ranks_per_host
        facts = _FACTS | {
            "env.WORLD_SIZE": str(job.num_ranks), "env.SLURM_TOPOLOGY_ADDR": job.address(rank),
            "env.SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            "env.CUDA_VISIBLE_DEVICES": str(rank % job.ranks_per_host),
            "gpu.uuid": f"GPU-{rank}", "host.memory_bytes": str(_MEMORY_BYTES),
        }  # fmt: skip
        if host in odd:
            facts |= dict([DRIFTED])
        yield START_NS, schema.Environment(attempt=0, rank=rank, time_ns=START_NS, facts=facts)
