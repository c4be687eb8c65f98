"""What wears out or is set: ECC errors, remapped rows, retired pages, PCIe link, limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from rankscope.node.sources.base import Lane, Row, Source
from rankscope.node.sources.machine import Machine
from rankscope.node.sources.nvml import Gpu
from rankscope.wire.schema import ChunkKind

_CORRECTED, _UNCORRECTED = (
    "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
)  # fmt: skip
_SINCE_LOAD, _LIFETIME = "NVML_VOLATILE_ECC", "NVML_AGGREGATE_ECC"
# column -> question and its arguments
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "sm_clock_max_mhz": ("MaxClockInfo", "NVML_CLOCK_SM"),
    "memory_clock_max_mhz": ("MaxClockInfo", "NVML_CLOCK_MEM"),
    "ecc_corrected": ("TotalEccErrors", _CORRECTED, _SINCE_LOAD),
    "ecc_uncorrected": ("TotalEccErrors", _UNCORRECTED, _SINCE_LOAD),
    "ecc_lifetime_corrected": ("TotalEccErrors", _CORRECTED, _LIFETIME),
    "ecc_lifetime_uncorrected": ("TotalEccErrors", _UNCORRECTED, _LIFETIME),
    "retire_pending": ("RetiredPagesPendingStatus",),
    "pcie_replays_total": ("PcieReplayCounter",),
    "pcie_generation": ("CurrPcieLinkGeneration",),
    "pcie_generation_max": ("MaxPcieLinkGeneration",),
    "pcie_width": ("CurrPcieLinkWidth",),
    "pcie_width_max": ("MaxPcieLinkWidth",),
}
_RETIRED = {
    "retired_single_bit": "NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS",
    "retired_double_bit": "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR",
}
_REMAPPED = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")


class GpuHealthSource(Source):
    """ECC errors, remapped rows, retired pages, PCIe link, power limit and largest clocks."""

    name: ClassVar[str] = "gpu-health"
    kind: ClassVar[ChunkKind | None] = "gpu_health"
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 10

    def __init__(self, machine: Machine) -> None:
        self._nvml = machine.nvml

    def open(self) -> None:
        """Find the GPUs. Raises Skipped where there is none."""
        self._nvml.open()

    def sample(self) -> Iterable[Row]:
        """Return one row for each GPU."""
        return [self._row(gpu) for gpu in self._nvml.gpus]

    def _row(self, gpu: Gpu) -> Row:
        nvml = self._nvml
        values: dict[str, Any] = {
            column: nvml.ask(gpu, *question) for column, question in _QUESTIONS.items()
        }
        limit = nvml.ask(gpu, "EnforcedPowerLimit")
        values["power_limit_watts"] = None if limit is None else limit / 1000
        for column, cause in _RETIRED.items():
            pages = nvml.ask(gpu, "RetiredPages", cause)
            values[column] = None if pages is None else len(pages)
        rows = nvml.ask(gpu, "RemappedRows")
        values |= zip(_REMAPPED, rows, strict=True) if rows is not None else ()
        row: dict[str, float | str] = {name: v for name, v in values.items() if v is not None}
        return {"gpu": gpu.index, **row}
