"""gpu.pcie: the way from the host to each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import not_measured
from rankscope.preflight.checks.gpu.each import finding, gpus, nodes_with
from rankscope.preflight.facts.gpu import Gpu
from rankscope.preflight.model import Finding, Scope, Tier

SLOW_RATIO = 0.6  # of the median: less is a link of half the lanes, or one generation down


class GpuPcie:
    """Every GPU has all lanes of its PCIe link, and under load the full generation.

    A link at rest steps its generation down to save power: only --deep, which loads it, judges
    that, and the speed of a copy.
    """

    id: ClassVar[str] = "gpu.pcie"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn of links that are narrower, older or slower than they could be."""
        yield from not_measured(self.id, run, "gpu")
        bad: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu in gpus(run):
            width, most = gpu.pcie_width, gpu.pcie_width_max
            if width and most and width < most:
                bad.setdefault(node, []).append((gpu, f"PCIe x{width} of x{most}"))
        for node, gpu, what in self._loaded(run):
            if all(gpu is not known for known, _ in bad.get(node, ())):
                bad.setdefault(node, []).append((gpu, what))
        if bad:
            yield finding(
                self.id,
                "warn",
                bad,
                command="sudo lspci -vv -d 10de: | grep -e NVIDIA -e LnkSta:   # reseat the card",
                would="loading batches and offloading are slower on this GPU, and all wait for it",
                wrong_if="the slot is meant to be narrower",
            )

    def _loaded(self, run: Run) -> Iterator[tuple[str, Gpu, str]]:
        speeds = [b.copy_gb_per_s for _, f in nodes_with(run) for b in f.burns if b.copy_gb_per_s]
        usual = median(speeds) if len(speeds) > 2 else 0.0
        for node, facts in nodes_with(run):
            by_uuid = {gpu.uuid: gpu for gpu in facts.gpus}
            for burn in facts.burns:
                gpu = by_uuid.get(burn.uuid)
                if gpu is None:
                    continue
                now, most = burn.pcie_generation, gpu.pcie_generation_max
                if now and most and now < most:
                    yield node, gpu, f"PCIe generation {now} of {most} under load"
                elif burn.copy_gb_per_s and burn.copy_gb_per_s < SLOW_RATIO * usual:
                    text = f"{burn.copy_gb_per_s:.1f} GB/s from the host, median {usual:.1f} GB/s"
                    yield node, gpu, text
