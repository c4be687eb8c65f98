"""Faults in the memory of a host: a rank, or its loader, keeps more and more, or gets no more."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import MIB, Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class MemoryLeak(Fault):
    """Each step keeps so much more host memory, for ever."""

    name = "memory_leak"
    finding = "memory_growth"
    place = Place.AFTER_UPDATE
    default_size = Magnitude(mib=4.0)
    size_is = "growth in each step"

    def __init__(self) -> None:
        """Nothing is leaked yet."""
        self._leaked: list[bytes] = []

    def fire(self, context: FaultContext) -> None:
        """Keep memory that is really written to, or the system would not really give it."""
        self._leaked.append(b"\x01" * int(context.size() * MIB))
        context.add(leaked_mib=context.size())


class WorkerLeak(Fault):
    """In each step each loader worker of the rank keeps so much more memory, for ever."""

    name = "worker_leak"
    finding = "memory_growth"
    place = Place.STEP
    default_size = Magnitude(mib=4.0)
    size_is = "growth in each step"

    def __init__(self) -> None:
        """Nothing is to be leaked yet."""
        # Shared with the workers, which are forked before some step fires.
        self._wanted_bytes = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self._leaked: list[bytes] = []
        self._leaked_bytes = 0

    def check(self, settings: Settings, world_size: int) -> None:
        """A rank that loads its own data has no workers."""
        if not settings.loader_workers:
            problem = "worker_leak needs processes that load the data"
            raise SettingError("fault", problem, "Set loader_workers to 1 or more")

    def fire(self, context: FaultContext) -> None:
        """Raise the number of bytes that each worker keeps from now on."""
        self._wanted_bytes[0] += int(context.size() * MIB)
        context.add(leaked_mib=context.size())

    def act_in_worker(self) -> None:
        """Keep memory that is really written to, or the system would not really give it."""
        missing = self._wanted_bytes[0] - self._leaked_bytes
        if missing > 0:
            self._leaked.append(b"\x01" * missing)
            self._leaked_bytes += missing


class OutOfMemory(Fault):
    """The rank may map only so much more memory, allocates until that is used up, and fails."""

    name = "out_of_memory"
    finding = "crash"
    place = Place.BEFORE_FORWARD
    default_size = Magnitude(mib=64.0)
    size_is = "memory that is left"
    piece_mib = 4

    def begin(self, context: FaultContext) -> None:
        """Limit the address space of this process."""
        mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = mapped_pages * resource.getpagesize() + int(context.size() * MIB)
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._before[1]))

    def fire(self, context: FaultContext) -> None:
        """Keep activations that are never freed; PyTorch's allocator raises the error."""
        import torch

        activations = []
        while True:
            # Written, so that the pages are really used.
            activations.append(torch.ones(self.piece_mib * MIB // 4))
            context.add(allocated_mib=self.piece_mib)

    def end(self, context: FaultContext) -> None:
        """Lift the limit, so that the failure can be reported."""
        resource.setrlimit(resource.RLIMIT_AS, self._before)
