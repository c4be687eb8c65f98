"""Processes on each GPU and their memory, mapped to ranks by pid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Lane, Row, Source
from rankscope.node.sources.machine import Machine
from rankscope.wire.schema import NODE_RANK, ChunkKind

_MAX_PROCESSES = 64  # of one GPU


class GpuProcessSource(Source):
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
