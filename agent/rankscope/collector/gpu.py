"""Samples of the GPUs, once a second, from NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rankscope.collector.samples import Row
from rankscope.schema import GPU_COLUMNS

_NOT_KNOWN = -1


class GpuUnavailable(RuntimeError):
    """There is nothing to sample; the message says why, for people."""


class GpuSampler:
    """All GPUs of the node, whichever of them the ranks may see. Raises GpuUnavailable."""

    def __init__(self, nvml: Any = None, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._nvml = nvml if nvml is not None else _import_nvml()
        self._wall_ns = wall_ns
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except self._nvml.NVMLError as error:
            raise GpuUnavailable(f"NVML: {error}") from error
        if not self._handles:
            raise GpuUnavailable("NVML finds no GPU")

    def sample(self) -> list[Row]:
        """Return one row of schema.GPU_COLUMNS for each GPU, -1 for what it does not tell."""
        now = self._wall_ns()
        return [self._row(now, index, handle) for index, handle in enumerate(self._handles)]

    def _row(self, now: int, index: int, handle: Any) -> Row:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        values: dict[str, float] = {
            "time_ns": now,
            "gpu": index,
            "utilization_ratio": _NOT_KNOWN if utilization is None else utilization.gpu / 100,
            "memory_used_bytes": _NOT_KNOWN if memory is None else memory.used,
            "memory_total_bytes": _NOT_KNOWN if memory is None else memory.total,
            "sm_clock_mhz": self._number(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "power_watts": _NOT_KNOWN if power is None else power / 1000,
            "temperature_celsius": self._number(
                nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "throttle_reasons": self._number(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle
            ),
            "ecc_uncorrected": self._number(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
        }
        return tuple(values[name] for name in GPU_COLUMNS)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:  # this device does not tell, or not now
            return None

    def _number(self, question: Callable[..., Any], *arguments: Any) -> int:
        answer = self._ask(question, *arguments)
        return _NOT_KNOWN if answer is None else int(answer)


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise GpuUnavailable(f"pynvml cannot be imported: {error}") from error
    return pynvml
