"""gpu.recovery: what the driver itself asks for, and what it wrote to the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.gpu.each import finding, gpus, nodes_with
from rankscope.preflight.facts.gpu import Gpu
from rankscope.preflight.model import Finding, Fix, Scope, Tier
from rankscope.wire.nvidia_codes import xid_words

# Faults of the hardware or the driver (NVIDIA, "Xid Errors"); the others are mostly faults of
# programs that ran before, and say nothing about the GPU.
_HARDWARE = frozenset({46, 48, 61, 62, 64, 74, 79, 92, 95, 119, 120, 136, 140, 143, 144, 145, 149,
                       154, 155, 158})  # fmt: skip


class GpuRecovery:
    """No GPU waits for a reset, no question to the driver fails, no hardware Xid since boot.

    A driver's error is a failure; an Xid of the past only warns, for a reset may have mended it.
    """

    id: ClassVar[str] = "gpu.recovery"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on what is so now, warn of what the log holds."""
        yield from not_measured(self.id, run, "gpu")
        wanted: dict[str, list[tuple[Gpu, str]]] = {}
        errors: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu in gpus(run):
            if gpu.recovery_action not in ("", "none"):
                wanted.setdefault(node, []).append(
                    (gpu, f"the driver asks for: {gpu.recovery_action}")
                )
            elif gpu.errors:
                name, text = next(iter(gpu.errors.items()))
                errors.setdefault(node, []).append((gpu, f"the driver fails: {text} ({name})"))
        if wanted:
            yield finding(
                self.id,
                "fail",
                wanted,
                command="sudo nvidia-smi --gpu-reset -i {index}   # or reboot, as it asks",
                would="the rank on this GPU fails or hangs at its first kernel",
                wrong_if="the recovery is under way",
            )
        if errors:
            yield finding(
                self.id,
                "fail",
                errors,
                command="nvidia-smi -q -i {index}; sudo dmesg | grep -i -e xid -e nvrm | tail",
                would="the rank on this GPU fails or hangs",
                wrong_if="the driver of this GPU does not know the question and says so wrongly",
            )
        yield from _log(run)


def _log(run: Run) -> Iterator[Finding]:
    seen: dict[str, list[str]] = {}
    denied: list[str] = []
    for node, facts in nodes_with(run):
        if facts.recording:
            continue  # the log is that of another machine
        if facts.host.xid_problem:
            denied.append(node)
        for xid in facts.host.xids:
            if xid.number in _HARDWARE:
                what = f"Xid {xid.number} ({xid_words(xid.number)}) x {xid.count} at {xid.bus_id}"
                seen.setdefault(node, []).append(what)
    for node, texts in seen.items():
        yield Finding(
            id=GpuRecovery.id,
            status="warn",
            nodes=(node,),
            title=f"{node}: since boot: {texts[0]}",
            evidence={"xids": texts},
            told=tuple(texts),
            fix=(Fix(node=node, command="sudo dmesg -T | grep Xid", owner="admin"),),
            would="the GPU may fail again under load",
            wrong_if="the GPU was reset since, and has run well",
            confidence="likely",
        )
    if denied:
        title = f"{listed(denied)}: Xid errors of this boot: the kernel log cannot be read"
        yield Finding(id=GpuRecovery.id, status="unknown", nodes=tuple(denied), title=title)
