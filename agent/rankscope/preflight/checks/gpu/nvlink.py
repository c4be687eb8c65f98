"""gpu.nvlink: links between the GPUs of a node, and the fabric of NVSwitches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.checks.gpu.each import finding, gpus, nodes_with
from rankscope.preflight.facts.gpu import Gpu, GpuFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier

# bits of the health mask: 1 in bits 0-1 is degraded bandwidth, in bits 4-5 an unhealthy route
_DEGRADED, _UNHEALTHY_ROUTE = (0, 1), (4, 1)
RECOVERIES = 1  # a link that had to be recovered even once has lost packets to hardware


class GpuNvlink:
    """All NVLinks are up and without errors, and the fabric of NVSwitches is complete.

    A GPU of which some links are down works, and holds the others up.
    """

    id: ClassVar[str] = "gpu.nvlink"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on links that are down, and on a fabric that is not up."""
        yield from not_measured(self.id, run, "gpu")
        if not any(gpu.links for _, gpu in gpus(run)):
            yield Finding(id=self.id, status="skipped", title="no GPU has NVLink")
            return
        yield from self._fabric(run)
        down, worn = _links(run)
        if down:
            yield finding(
                self.id,
                "fail",
                down,
                command="nvidia-smi nvlink --status -i {index}; sudo nvidia-smi --gpu-reset",
                would="NCCL goes around by PCIe: all-reduce of the node is several times slower",
                wrong_if="the node is built with fewer links than the GPU has",
            )
        if worn:
            yield finding(
                self.id,
                "warn",
                worn,
                command="nvidia-smi nvlink --errorcounters -i {index}",
                would="Xid 74 and a dead job, when a link fails altogether",
                wrong_if="the counters are of a time before a repair",
            )
        yield from _topology(run)

    def _fabric(self, run: Run) -> Iterator[Finding]:
        bad: dict[str, list[tuple[Gpu, str]]] = {}
        sick: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu in gpus(run):
            if gpu.fabric_state in ("not started", "in progress"):
                bad.setdefault(node, []).append((gpu, f"the NVSwitch fabric is {gpu.fabric_state}"))
            elif gpu.fabric_state == "completed" and gpu.fabric_status:
                what = f"the NVSwitch fabric failed with NVML error {gpu.fabric_status}"
                bad.setdefault(node, []).append((gpu, what))
            elif (what := _health(gpu)) != "":
                sick.setdefault(node, []).append((gpu, what))
        if bad:
            yield finding(
                self.id,
                "fail",
                bad,
                command="sudo systemctl restart nvidia-fabricmanager; nvidia-smi -q -i {index}",
                would="CUDA fails with error 802 'system not yet initialized'",
                wrong_if="the node has just booted and the fabric manager still works",
            )
        if sick:
            yield finding(
                self.id,
                "fail",
                sick,
                command="nvidia-smi -q -i {index} | grep -A12 Fabric; sudo nvidia-smi --gpu-reset",
                would="collectives within the fabric are slow, or fail",
                wrong_if="the fabric manager is just rebuilding its routes",
            )


def _health(gpu: Gpu) -> str:
    mask = gpu.fabric_health or 0
    for (shift, value), words in (
        (_DEGRADED, "the NVSwitch fabric has degraded bandwidth"),
        (_UNHEALTHY_ROUTE, "a route through the NVSwitch fabric is unhealthy"),
    ):
        if mask >> shift & 0b11 == value:
            return words
    return ""


def _links(
    run: Run,
) -> tuple[dict[str, list[tuple[Gpu, str]]], dict[str, list[tuple[Gpu, str]]]]:
    """Return GPUs with links down, and those with links that had to be recovered.

    Down counts only against a GPU of the same model that has the link up: boards leave links out.
    """
    most: dict[str, int] = {}
    for _, gpu in gpus(run):
        most[gpu.name] = max(most.get(gpu.name, 0), _active(gpu))
    down: dict[str, list[tuple[Gpu, str]]] = {}
    worn: dict[str, list[tuple[Gpu, str]]] = {}
    for node, gpu in gpus(run):
        if gpu.links and _active(gpu) < most[gpu.name]:
            what = f"{_active(gpu)} of {most[gpu.name]} NVLinks are up"
            down.setdefault(node, []).append((gpu, what))
        recovered = [n.number for n in gpu.links if n.errors.get("recovery", 0) >= RECOVERIES]
        if recovered:
            what = f"NVLink {', '.join(map(str, recovered))} had to be recovered"
            worn.setdefault(node, []).append((gpu, what))
    return down, worn


def _active(gpu: Gpu) -> int:
    return sum(link.is_active for link in gpu.links)


def _topology(run: Run) -> Iterator[Finding]:
    shapes = {node: _shape(facts) for node, facts in nodes_with(run) if facts.pairs}
    names = {node: {gpu.name for gpu in facts.gpus} for node, facts in nodes_with(run)}
    if len({frozenset(kinds) for kinds in names.values()}) > 1:
        return  # other models: other boards
    odd = odd_ones(shapes)
    if odd and 2 * len(odd) < len(shapes):
        yield Finding(
            id=GpuNvlink.id,
            status="warn",
            nodes=odd,
            title=f"{listed(odd)}: GPUs are wired otherwise than on the other nodes",
            evidence={"levels": shapes},
            told=compared(shapes),
            fix=tuple(Fix(node=node, command="nvidia-smi topo -m", owner="admin") for node in odd),
            would="NCCL finds another ring on this node: slower, and the others wait",
            wrong_if="the nodes are of different make",
        )


def _shape(facts: GpuFacts) -> str:
    """Return how many pairs of GPUs lie at each level."""
    levels = [pair.level for pair in facts.pairs]
    return ", ".join(f"{levels.count(level)} at level {level}" for level in sorted(set(levels)))
