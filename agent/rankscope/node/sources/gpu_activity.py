"""What the parts of a GPU were doing: GPU performance monitoring, Hopper and newer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.node.sources.nvml import Gpu
from rankscope.wire.schema import ChunkKind

_PERCENT, _MIB = 0.01, float(1 << 20)
# metric (NVML_GPM_METRIC_...) -> column and factor
_METRICS: dict[str, tuple[str, float]] = {
    "SM_UTIL": ("sm_ratio", _PERCENT),
    "SM_OCCUPANCY": ("sm_occupancy_ratio", _PERCENT),
    "ANY_TENSOR_UTIL": ("tensor_ratio", _PERCENT),
    "DRAM_BW_UTIL": ("memory_bandwidth_ratio", _PERCENT),
    "FP64_UTIL": ("fp64_ratio", _PERCENT),
    "FP32_UTIL": ("fp32_ratio", _PERCENT),
    "FP16_UTIL": ("fp16_ratio", _PERCENT),
    "PCIE_TX_PER_SEC": ("pcie_sent_bytes_per_second", _MIB),
    "PCIE_RX_PER_SEC": ("pcie_received_bytes_per_second", _MIB),
    "NVLINK_TOTAL_TX_PER_SEC": ("nvlink_sent_bytes_per_second", _MIB),
    "NVLINK_TOTAL_RX_PER_SEC": ("nvlink_received_bytes_per_second", _MIB),
}


class GpuActivitySource(SampleSource):
    """How busy multiprocessors, tensor cores and memory of each GPU were (Hopper and newer)."""

    name: ClassVar[str] = "gpu-activity"
    kind: ClassVar[ChunkKind | None] = "gpu_activity"
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._nvml = machine.nvml
        self._gpus: dict[int, tuple[Gpu, list[Any]]] = {}  # with two samples, the newer one last
        self._has_first: set[int] = set()

    def open(self) -> None:
        """Find the GPUs that offer it. Raises Skipped where none does."""
        self._nvml.open()
        module = self._nvml.module
        if not hasattr(module, "nvmlGpmMetricsGet"):
            raise Skipped("this pynvml is older than GPU performance monitoring")
        for gpu in self._nvml.gpus:
            support = self._nvml.call(gpu, "nvmlGpmQueryDeviceSupport")
            if support is None or not support.isSupportedDevice or gpu.index in self._gpus:
                continue
            try:
                pair = [module.nvmlGpmSampleAlloc(), module.nvmlGpmSampleAlloc()]
            except module.NVMLError as error:
                raise Skipped(f"NVML: {error}") from error
            self._gpus[gpu.index] = (gpu, pair)
        if not self._gpus:
            raise Skipped("no GPU of this node offers it: it needs Hopper or newer, without MIG")

    def sample(self) -> Iterable[Row]:
        """Return one row for each GPU, of the time since the row before."""
        rows = []
        for index, (gpu, pair) in self._gpus.items():
            pair.reverse()  # what was new is the older one now
            try:
                self._nvml.module.nvmlGpmSampleGet(gpu.handle, pair[1])
            except self._nvml.module.NVMLError:  # not now; differences begin anew
                self._has_first.discard(index)
                continue
            if index in self._has_first:
                rows.append(self._row(gpu, pair))
            self._has_first.add(index)
        return rows

    def _row(self, gpu: Gpu, pair: list[Any]) -> Row:
        module = self._nvml.module
        row: dict[str, float | str] = {"gpu": gpu.index}
        wanted = [
            (number, *column)
            for name, column in _METRICS.items()
            if (number := getattr(module, f"NVML_GPM_METRIC_{name}", None)) is not None
        ]
        question = module.c_nvmlGpmMetricsGet_t()
        question.version = module.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(wanted)
        question.sample1, question.sample2 = pair
        for place, (number, _, _) in enumerate(wanted):
            question.metrics[place].metricId = number
        try:
            module.nvmlGpmMetricsGet(question)
        except module.NVMLError:
            return row
        for place, (_, column, factor) in enumerate(wanted):
            metric = question.metrics[place]
            if metric.nvmlReturn == 0:
                row[column] = metric.value * factor
        return row
