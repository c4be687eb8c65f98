"""GPUs: load, memory and clocks, health, and what each process holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from rankscope.node.sources.base import Row
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.node.sources.nvml import Gpu
from rankscope.wire.schema import NODE_RANK, ChunkKind

_FIELDS = [("MEMORY_TEMP", 0), ("PCIE_COUNT_TX_BYTES", 0), ("PCIE_COUNT_RX_BYTES", 0)]


class GpuSource(SampleSource):
    """Use, memory, clocks, power, temperatures and slowdowns of each GPU, from NVML."""

    name: ClassVar[str] = "gpu"
    kind: ClassVar[ChunkKind | None] = "gpu"
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lost: set[int] = set()

    def open(self) -> None:
        """Find the GPUs and report which they are. Raises Skipped where there is none."""
        nvml = self._machine.nvml
        nvml.open()
        fields = {"driver": nvml.driver}
        for gpu in nvml.gpus:
            for name in ("name", "uuid", "bus_id"):
                fields[f"{gpu.index}.{name}"] = str(getattr(gpu, name))
        self._machine.report_of("gpus", fields)

    def sample(self) -> Iterable[Row]:
        """Return one row for each GPU."""
        return [self._row(gpu) for gpu in self._machine.nvml.gpus]

    def _row(self, gpu: Gpu) -> Row:
        nvml = self._machine.nvml
        reasons = nvml.ask(gpu, "CurrentClocksEventReasons")
        if reasons is None:  # the older name
            reasons = nvml.ask(gpu, "CurrentClocksThrottleReasons")
        memory_celsius, sent, received = nvml.fields(gpu, _FIELDS)
        power = nvml.ask(gpu, "PowerUsage")
        values: dict[str, float | None] = {
            "gpu": gpu.index,
            "sm_clock_mhz": nvml.ask(gpu, "ClockInfo", "NVML_CLOCK_SM"),
            "memory_clock_mhz": nvml.ask(gpu, "ClockInfo", "NVML_CLOCK_MEM"),
            "power_watts": None if power is None else power / 1000,
            "energy_mj_total": nvml.ask(gpu, "TotalEnergyConsumption"),
            "temperature_celsius": nvml.ask(gpu, "Temperature", "NVML_TEMPERATURE_GPU"),
            "memory_temperature_celsius": memory_celsius or None,  # 0: it has no such sensor
            "throttle_reasons": reasons,
            "performance_state": nvml.ask(gpu, "PerformanceState"),
            "pcie_sent_bytes_total": sent,
            "pcie_received_bytes_total": received,
        }
        used = nvml.ask(gpu, "UtilizationRates")
        if used is not None:
            values |= {
                "utilization_ratio": used.gpu / 100,
                "memory_utilization_ratio": used.memory / 100,
            }
        memory = nvml.ask(gpu, "MemoryInfo")
        if memory is not None:
            values |= {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}
        row: Row = {name: value for name, value in values.items() if value is not None}
        self._report_lost(gpu, is_lost=len(row) == 1)
        return row

    def _report_lost(self, gpu: Gpu, *, is_lost: bool) -> None:
        if is_lost == (gpu.index in self._lost):
            return
        self._lost ^= {gpu.index}
        name = "gpu does not answer" if is_lost else "gpu answers again"
        fields = {"gpu": str(gpu.index), "pci": gpu.bus_id, "uuid": gpu.uuid, "seen_in": "NVML"}
        self._machine.report_of(name, fields)


_CORRECTED, _UNCORRECTED = (
    "NVML_MEMORY_ERROR_TYPE_CORRECTED",
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
)
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


class GpuHealthSource(SampleSource):
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


_MAX_PROCESSES = 64  # of one GPU


class GpuProcessSource(SampleSource):
    """Processes on each GPU, their memory and rank; a stranger on the GPU has no rank."""

    name: ClassVar[str] = "gpu-process"
    kind: ClassVar[ChunkKind | None] = "gpu_process"
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 5

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def open(self) -> None:
        """Find the GPUs. Raises Skipped where there is none."""
        self._machine.nvml.open()

    def sample(self) -> Iterable[Row]:
        """Return one row for each process on each GPU."""
        ranks = {rank.pid: rank.rank for rank in self._machine.ranks()}
        rows: list[Row] = []
        for gpu in self._machine.nvml.gpus:
            processes = self._machine.nvml.ask(gpu, "ComputeRunningProcesses") or []
            for process in processes[:_MAX_PROCESSES]:
                memory = process.usedGpuMemory
                rows.append({
                    "gpu": gpu.index,
                    "pid": process.pid,
                    "rank": ranks.get(process.pid, NODE_RANK),
                    **({} if memory is None else {"memory_bytes": memory}),
                })  # fmt: skip
        return rows
