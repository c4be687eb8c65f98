"""env.slow_left: nothing is left over from debugging that slows the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _has_gpus(report: NodeReport, at_least: int = 1) -> bool:
    return report.facts.gpu is not None and report.facts.gpu.num_gpus >= at_least


def _has_rdma(report: NodeReport) -> bool:
    return report.facts.rdma is not None and bool(report.facts.rdma.ports)


_Row = tuple[str, Callable[[str], bool], Callable[[NodeReport], bool], str]
_ROWS: tuple[_Row, ...] = (
    ("NCCL_DEBUG", lambda v: v.upper() == "TRACE", _has_gpus, "NCCL writes a line per operation"),
    ("TORCH_DISTRIBUTED_DEBUG", lambda v: v.upper() == "DETAIL", lambda _: True,
     "every collective is preceded by one that compares it on all ranks"),
    ("CUDA_LAUNCH_BLOCKING", _is_on, _has_gpus, "each kernel is waited for"),
    ("NCCL_P2P_DISABLE", _is_on, lambda r: _has_gpus(r, 2), "GPUs do not use NVLink or PCIe"),
    ("NCCL_SHM_DISABLE", _is_on, lambda r: _has_gpus(r, 2), "ranks of a node use the network"),
    ("NCCL_IB_DISABLE", _is_on, _has_rdma, "InfiniBand and RoCE are there, and are not used"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, _has_gpus, "each tensor costs a cudaMalloc"),
)  # fmt: skip


class EnvSlowLeft:
    """No variable is left over from debugging that makes every step slower."""

    id: ClassVar[str] = "env.slow_left"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn on those that do something on that node."""
        for name, is_slow, applies, why in _ROWS:
            nodes = {
                report.node: report.facts.launch.environment[name]
                for report in run.present
                if report.facts.launch is not None
                and is_slow(report.facts.launch.environment.get(name, ""))
                and applies(report)
            }
            if nodes:
                value = next(iter(nodes.values()))
                yield Finding(
                    id=self.id,
                    status="warn",
                    nodes=tuple(nodes),
                    title=f"{listed(nodes)}: {name}={value} slows the job: {why}",
                    evidence={"variable": name, "values": nodes},
                    fix=tuple(Fix(node=node, command=f"unset {name}") for node in nodes),
                    would=f"the job runs, but slower: {why}",
                    wrong_if="this run is meant to find a bug",
                )
