"""gpu.p2p: whether GPUs reach each other, and the network card reaches them, without the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.gpu.each import nodes_with
from rankscope.preflight.facts.gpu import GpuFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class GpuP2p:
    """GPUs of a node reach each other, and RDMA reaches them, without a copy through the host.

    Looks at peer access, translation by the IOMMU, access control (ACS) on PCIe bridges, and
    nvidia_peermem or dma-buf.
    """

    id: ClassVar[str] = "gpu.p2p"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn of each way that is closed."""
        yield from not_measured(self.id, run, "gpu")
        found: dict[tuple[str, str, str], list[str]] = {}
        unread: list[str] = []
        for node, facts in nodes_with(run):
            if len(facts.gpus) > 1:
                for row in _between(facts):
                    found.setdefault(row, []).append(node)
                if facts.host.num_acs_bridges is None and not facts.recording:
                    unread.append(node)
            rdma = run.reports[node].facts.rdma
            if rdma is not None and rdma.ports and _is_closed_to_rdma(facts):
                found.setdefault(_NO_PEERMEM, []).append(node)
        for (what, command, would), nodes in found.items():
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {what}",
                evidence={"what": what},
                told=tuple(f"{node}: {what}" for node in nodes),
                fix=tuple(Fix(node=node, command=command, owner="admin") for node in nodes),
                would=would,
                wrong_if="this is a virtual machine, where it cannot be otherwise",
            )
        if unread:
            title = f"{listed(unread)}: access control on PCIe bridges: only root may read it"
            yield Finding(id=self.id, status="unknown", nodes=tuple(unread), title=title)


_NO_PEERMEM = (
    "RDMA cannot reach GPU memory: nvidia_peermem is not loaded, and the driver has no dma-buf",
    "sudo modprobe nvidia_peermem",
    "NCCL copies through the host for every message between nodes: a fraction of the bandwidth",
)


def _between(facts: GpuFacts) -> Iterator[tuple[str, str, str]]:
    """Yield what closes the way between GPUs of a node: words, command, consequence."""
    closed = [pair for pair in facts.pairs if pair.p2p in ("chipset", "topology", "disabled")]
    would = "NCCL copies through the memory of the host: all-reduce of the node is slower"
    if closed:
        why = closed[0].p2p
        text = f"GPU {closed[0].first} and GPU {closed[0].second} cannot reach each other: {why}"
        more = f" ({len(closed)} pairs)" if len(closed) > 1 else ""
        yield f"{text}{more}", "nvidia-smi topo -p2p r", would
    has_links = any(link.is_active for gpu in facts.gpus for link in gpu.links)
    if has_links:
        return  # traffic between the GPUs takes NVLink, whatever the bus does
    if any(kind.startswith("DMA") for kind in facts.host.iommu_types):
        yield (
            f"the IOMMU translates for GPUs ({', '.join(facts.host.iommu_types)})",
            "add iommu=pt to the kernel's command line and reboot",
            "copies between GPUs are slow or hang",
        )
    if facts.host.num_acs_bridges:
        yield (
            f"access control (ACS) is on at {facts.host.num_acs_bridges} PCIe bridges",
            "for b in $(lspci -d ::0604 | cut -d' ' -f1); do "
            "sudo setpci -s $b ECAP_ACS+0x6.w=0000 2>/dev/null; done",
            "traffic between GPUs goes up to the processor and back: slow, or NCCL hangs",
        )


def _is_closed_to_rdma(facts: GpuFacts) -> bool:
    host = facts.host
    return host.has_kernel_driver and not host.has_peermem and host.is_open_driver is False
