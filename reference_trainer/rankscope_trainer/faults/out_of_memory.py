"""A rank that runs out of memory, for real, under a limit of its own."""

import resource
from pathlib import Path
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

MIB = 2**20
PIECE_MIB = 4


class OutOfMemory(Fault):
    """The rank may map only so much more memory, allocates until that is used up, and fails."""

    name: ClassVar[str] = "out_of_memory"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.BEFORE_FORWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(mib=64.0)
    size_is: ClassVar[str] = "memory that is left"

    def begin(self, context: FaultContext) -> None:
        """Limit the address space of this process."""
        mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = mapped_pages * resource.getpagesize() + int(context.size() * MIB)
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._before[1]))

    def fire(self, context: FaultContext) -> None:
        """Keep activations that are never freed; PyTorch's allocator raises the error."""
        import torch

        kept = []
        while True:
            kept.append(torch.ones(PIECE_MIB * MIB // 4))  # written, so the pages are really used
            context.add(allocated_mib=PIECE_MIB)

    def end(self, context: FaultContext) -> None:
        """Lift the limit, so that the failure can be told."""
        resource.setrlimit(resource.RLIMIT_AS, self._before)
