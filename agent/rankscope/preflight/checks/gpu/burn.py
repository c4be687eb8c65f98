"""gpu.burn: every GPU does the same work at a like pace."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.gpu.each import finding, nodes_with
from rankscope.preflight.facts.gpu import Gpu
from rankscope.preflight.facts.gpu_burn import Burn
from rankscope.preflight.model import Finding, Scope, Tier
from rankscope.wire.nvidia_codes import throttle_words

SLOW_RATIO = 0.85  # of the median: GPUs of one model differ by a few per cent
LEAST_GPUS = 3  # of two, nobody can say which is the slow one


class GpuBurn:
    """Half a second of matrix products runs at a like pace on every GPU, with the same result."""

    id: ClassVar[str] = "gpu.burn"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "deep"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu", "torch"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on errors and wrong results, warn of slow GPUs."""
        yield from not_measured(self.id, run, "gpu")
        rows: list[tuple[str, Gpu, Burn]] = []
        untold: list[str] = []
        for node, facts in nodes_with(run):
            by_uuid = {gpu.uuid: gpu for gpu in facts.gpus}
            by_index = {gpu.index: gpu for gpu in facts.gpus}
            for burn in facts.burns:
                gpu = by_uuid.get(burn.uuid) or by_index.get(burn.index)
                if gpu is not None:
                    rows.append((node, gpu, burn))
            if not facts.burns:
                untold.append(f"{node}: {facts.burn_problem or 'no load was measured'}")
        yield from self._broken(rows)
        yield from self._slow(rows)
        if untold:
            yield Finding(id=self.id, status="unknown", title=listed(untold))

    def _broken(self, rows: list[tuple[str, Gpu, Burn]]) -> Iterator[Finding]:
        bad: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu, burn in rows:
            if burn.error:
                bad.setdefault(node, []).append((gpu, burn.error))
            elif not burn.is_correct:
                bad.setdefault(node, []).append((gpu, "the same product came out in two ways"))
        if bad:
            yield finding(
                self.id,
                "fail",
                bad,
                command="nvidia-smi -q -i {index}; dcgmi diag -r 3 -i {index}",
                would="the rank on this GPU dies, or trains with wrong numbers",
                wrong_if="another process takes the GPU's memory at this moment",
            )

    def _slow(self, rows: list[tuple[str, Gpu, Burn]]) -> Iterator[Finding]:
        models: dict[str, list[tuple[str, Gpu, Burn]]] = {}
        for node, gpu, burn in rows:
            if burn.bf16_tflops > 0:
                models.setdefault(gpu.name, []).append((node, gpu, burn))
        for found in models.values():
            if len(found) < LEAST_GPUS:
                continue
            usual = median(burn.bf16_tflops for _, _, burn in found)
            bad: dict[str, list[tuple[Gpu, str]]] = {}
            for node, gpu, burn in found:
                if burn.bf16_tflops < SLOW_RATIO * usual:
                    why = ", ".join(throttle_words(burn.clock_reasons or 0))
                    what = f"{burn.bf16_tflops:.0f} TFLOP/s in bf16, median {usual:.0f}"
                    bad.setdefault(node, []).append((gpu, f"{what}{f' ({why})' if why else ''}"))
            if bad:
                yield finding(
                    self.id,
                    "warn",
                    bad,
                    command="nvidia-smi -q -d PERFORMANCE,POWER,CLOCK -i {index}",
                    would="all ranks wait for this GPU in every step",
                    wrong_if="another process used the GPU at this moment",
                )
