"""gpu.count: as many GPUs as ranks, on every node, and a driver that answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.facts.gpu import GpuFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class GpuCount:
    """Every node has a GPU for each rank, all have equally many, and the driver answers.

    Applies where the job uses NCCL, or where a driver for GPUs is loaded and fails.
    """

    id: ClassVar[str] = "gpu.count"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on a driver that fails, a lost GPU, and fewer GPUs than ranks."""
        facts = {r.node: r.facts.gpu for r in run.present if r.facts.gpu is not None}
        is_wanted = run.backend == "nccl"
        if not is_wanted and not any(_is_there(one) for one in facts.values()):
            yield Finding(id=self.id, status="skipped", title="no GPU on any node")
            return
        yield from not_measured(self.id, run, "gpu")
        broken = {node: why for node, one in facts.items() if (why := _broken(one))}
        yield from _driver(broken)
        yield from _lost({n: one for n, one in facts.items() if one.lost})
        yield from _invisible({n: one for n, one in facts.items() if one.invisible})
        told = {n: one for n, one in facts.items() if n not in broken and not one.invisible}
        if not is_wanted:
            return
        few = {n: one for n, one in told.items() if one.num_gpus < run.nproc(n)}
        if few:
            yield self._few(run, few)
        else:
            yield from self._unequal({n: one.num_gpus for n, one in told.items()})

    def _few(self, run: Run, few: dict[str, GpuFacts]) -> Finding:
        node, one = min(few.items(), key=lambda item: item[1].num_gpus)
        counts = {name: facts.num_gpus for name, facts in few.items()}
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(few),
            title=f"{listed(few)}: {one.num_gpus} GPUs for {run.nproc(node)} ranks",
            evidence={"num_gpus": counts, "on_bus": {n: f.host.num_on_bus for n, f in few.items()}},
            told=tuple(
                f"{name}: NVML counts {facts.count}, the bus {facts.host.num_on_bus}, "
                f"CUDA_VISIBLE_DEVICES is {facts.visible or 'not set'}"
                + (f" ({facts.absence})" if facts.absence else "")
                for name, facts in few.items()
            ),
            fix=tuple(
                Fix(node=name, command=f"nvidia-smi -L   # or --nproc-per-node {max(count, 1)}")
                for name, count in counts.items()
            ),
            would="ranks die with 'invalid device ordinal' or share a GPU; NCCL: 'Duplicate GPU'",
            wrong_if="GPUs are handed to the job only when it starts",
        )

    def _unequal(self, counts: dict[str, int]) -> Iterator[Finding]:
        odd = odd_ones(counts)
        if not odd:
            return
        yield Finding(
            id=self.id,
            status="warn",
            nodes=odd,
            title=f"{listed(odd)}: {counts[odd[0]]} GPUs, not as many as the other nodes",
            evidence={"num_gpus": counts},
            told=compared(counts),
            fix=tuple(
                Fix(node=node, command="nvidia-smi -L; lspci | grep -i nvidia") for node in odd
            ),
            would="one number of ranks does not fit all nodes",
            wrong_if="the nodes are meant to differ",
        )


def _is_there(facts: GpuFacts) -> bool:
    return bool(facts.count or facts.problem or facts.host.has_kernel_driver)


def _broken(facts: GpuFacts) -> str:
    """Return why NVML fails where there is a driver; empty: it works, or there is none."""
    if facts.problem:
        return facts.problem
    if facts.absence and facts.host.has_kernel_driver:
        return f"{facts.absence}, and the kernel driver is loaded"
    return ""


def _driver(broken: dict[str, str]) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for node, why in broken.items():
        reasons.setdefault(why, []).append(node)
    for why, nodes in reasons.items():
        yield Finding(
            id=GpuCount.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: the GPU driver does not answer: {why}",
            evidence={"error": why},
            told=tuple(f"{node}: {why}" for node in nodes),
            fix=tuple(
                Fix(node=node, command="nvidia-smi; cat /proc/driver/nvidia/version", owner="admin")
                for node in nodes
            ),
            would="no GPU can be used on this node: its ranks die, the others wait",
            wrong_if="the preflight runs in a container without the driver, the job does not",
        )


def _lost(lost: dict[str, GpuFacts]) -> Iterator[Finding]:
    if not lost:
        return
    texts = {n: [f"GPU {i}: {why}" for i, why in one.lost.items()] for n, one in lost.items()}
    first = next(iter(texts.values()))[0]
    yield Finding(
        id=GpuCount.id,
        status="fail",
        nodes=tuple(lost),
        title=f"{listed(lost)}: {first}",
        evidence={"lost": {node: one.lost for node, one in lost.items()}},
        told=tuple(f"{node}: {text}" for node, found in texts.items() for text in found),
        fix=tuple(
            Fix(node=node, command="sudo dmesg | grep -i xid; sudo reboot", owner="admin")
            for node in lost
        ),
        would="the rank of this GPU dies when it sets its device",
        wrong_if="the GPU is being reset at this moment",
    )


def _invisible(bad: dict[str, GpuFacts]) -> Iterator[Finding]:
    for node, one in bad.items():
        names = ",".join(str(gpu.index) for gpu in one.gpus)
        yield Finding(
            id=GpuCount.id,
            status="fail",
            nodes=(node,),
            title=f"{node}: CUDA_VISIBLE_DEVICES={one.visible}: there is no GPU {one.invisible}",
            evidence={"visible": one.visible, "count": one.count, "usable": one.num_gpus},
            told=(f"{node}: CUDA stops at the first entry that names no GPU: {one.num_gpus} left",),
            fix=(Fix(node=node, command=f"export CUDA_VISIBLE_DEVICES={names}"),),
            would="ranks die with 'invalid device ordinal'",
            wrong_if="the launcher sets the variable anew",
        )
