"""GPUs each second: use, memory, clocks, power, temperatures, reasons for lower clocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Lane, Row, Source
from rankscope.node.sources.machine import Machine
from rankscope.node.sources.nvml import Gpu
from rankscope.wire.schema import ChunkKind

_FIELDS = [("MEMORY_TEMP", 0), ("PCIE_COUNT_TX_BYTES", 0), ("PCIE_COUNT_RX_BYTES", 0)]


class GpuSource(Source):
    """Use, memory, clocks, power, temperatures and slowdowns of each GPU, from NVML."""

    name: ClassVar[str] = "gpu"
    kind: ClassVar[ChunkKind | None] = "gpu"
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lost: set[int] = set()

    def open(self) -> None:
        """Find the GPUs and tell which they are. Raises Skipped where there is none."""
        nvml = self._machine.nvml
        nvml.open()
        fields = {"driver": nvml.driver}
        for gpu in nvml.gpus:
            for name in ("name", "uuid", "bus_id"):
                fields[f"{gpu.index}.{name}"] = str(getattr(gpu, name))
        self._machine.tell_of("gpus", fields)

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
                "utilization_ratio": used.gpu / 100, "memory_utilization_ratio": used.memory / 100,
            }  # fmt: skip
        memory = nvml.ask(gpu, "MemoryInfo")
        if memory is not None:
            values |= {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}
        row: Row = {name: value for name, value in values.items() if value is not None}
        self._tell_lost(gpu, is_lost=len(row) == 1)
        return row

    def _tell_lost(self, gpu: Gpu, *, is_lost: bool) -> None:
        if is_lost == (gpu.index in self._lost):
            return
        self._lost ^= {gpu.index}
        name = "gpu does not answer" if is_lost else "gpu answers again"
        fields = {"gpu": str(gpu.index), "pci": gpu.bus_id, "uuid": gpu.uuid, "seen_in": "NVML"}
        self._machine.tell_of(name, fields)
