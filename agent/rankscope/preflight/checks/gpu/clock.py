"""gpu.clock: what holds a GPU's clocks down, and settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import by_value, not_measured
from rankscope.preflight.checks.gpu.each import finding, gpus
from rankscope.preflight.facts.gpu import Gpu
from rankscope.preflight.model import Finding, Scope, Tier
from rankscope.wire.nvidia_codes import throttle_words

# Hardware slowdown, hardware thermal slowdown, power brake: never of a healthy GPU, idle or busy.
# A power cap by software is normal under load, and heat is judged by the thermal bits.
_HARDWARE_BITS = 0x008 | 0x040 | 0x080
_THERMAL_BIT = 0x020

_SETTINGS: dict[str, tuple[Callable[[Gpu], object], str]] = {
    "power limit": (
        lambda gpu: None if gpu.power_limit_mw is None else f"{gpu.power_limit_mw / 1e3:.0f} W",
        "sudo nvidia-smi -i {index} -pl WATTS   # as on the other GPUs",
    ),
    "highest SM clock": (
        lambda gpu: None if gpu.sm_clock_max_mhz is None else f"{gpu.sm_clock_max_mhz} MHz",
        "sudo nvidia-smi -i {index} -rgc; sudo nvidia-smi -i {index} -rac",
    ),
    "persistence mode": (
        lambda gpu: None if gpu.persistence is None else "on" if gpu.persistence else "off",
        "sudo nvidia-smi -i {index} -pm 1",
    ),
    "MIG": (
        lambda gpu: None if gpu.mig is None else "on" if gpu.mig else "off",
        "sudo nvidia-smi -i {index} -mig 0   # or 1, as on the other GPUs",
    ),
    "compute mode": (lambda gpu: gpu.compute_mode or None, "sudo nvidia-smi -i {index} -c 0"),
}


class GpuClock:
    """Nothing holds a GPU's clocks down, and all GPUs are set alike.

    Compared are power limit, highest clock, persistence, MIG and compute mode, among GPUs of one
    model, over all nodes.
    """

    id: ClassVar[str] = "gpu.clock"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on a slowdown by hardware, warn of heat and of differences."""
        yield from not_measured(self.id, run, "gpu")
        slow: dict[str, list[tuple[Gpu, str]]] = {}
        warm: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu in gpus(run):
            reasons = gpu.clock_reasons or 0
            what = f"{', '.join(throttle_words(reasons))}, {gpu.temperature_c} C"
            if reasons & _HARDWARE_BITS:
                slow.setdefault(node, []).append((gpu, f"clocks are held down: {what}"))
            elif reasons & _THERMAL_BIT:
                warm.setdefault(node, []).append((gpu, f"clocks are held down: {what}"))
        for status, bad in (("fail", slow), ("warn", warm)):
            if bad:
                yield finding(
                    self.id,
                    "fail" if status == "fail" else "warn",
                    bad,
                    command="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {index}"
                    "   # look at fans, cables, power supplies",
                    would="this GPU works at a fraction of its pace, and all ranks wait for it",
                    wrong_if="it passes as soon as the machine has cooled down",
                )
        yield from self._settings(run)

    def _settings(self, run: Run) -> Iterator[Finding]:
        models: dict[str, list[tuple[str, Gpu]]] = {}
        for node, gpu in gpus(run):
            models.setdefault(gpu.name, []).append((node, gpu))
        for rows in models.values():
            for name, (ask, command) in _SETTINGS.items():
                values = {
                    f"{node}/{gpu.index}": value
                    for node, gpu in rows
                    if (value := ask(gpu)) is not None
                }
                groups = by_value(values)
                usual = next(iter(groups), None)
                if len(groups) < 2 or 2 * len(groups[usual]) <= len(values):
                    continue  # no majority: nobody is the odd one
                bad: dict[str, list[tuple[Gpu, str]]] = {}
                for node, gpu in rows:
                    value = values.get(f"{node}/{gpu.index}", usual)
                    if value != usual:
                        what = f"{name} is {value}, of the others {usual}"
                        bad.setdefault(node, []).append((gpu, what))
                yield finding(
                    self.id,
                    "warn",
                    bad,
                    command=command.replace("WATTS", str(usual).removesuffix(" W")),
                    would="this GPU works at another pace, or cannot be used as the others",
                    wrong_if="it is meant so",
                )
