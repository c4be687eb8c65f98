"""A data loader whose worker processes keep what they have read."""

import mmap
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

MIB = 1 << 20


class WorkerLeak(Fault):
    """In each step each loader worker of the rank keeps so much more memory, for ever."""

    name: ClassVar[str] = "worker_leak"
    finding: ClassVar[str] = "memory_growth"
    place: ClassVar[Place] = Place.STEP
    default_size: ClassVar[Magnitude | None] = Magnitude(mib=4.0)
    size_is: ClassVar[str] = "growth in each step"

    def __init__(self) -> None:
        """Nothing is to be kept yet."""
        # Shared with the workers, which are forked before some step fires.
        self._wanted_bytes = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def check(self, settings: "Settings", world_size: int) -> None:
        """A rank that loads its own data has no workers."""
        if not settings.loader_workers:
            problem = "worker_leak needs processes that load the data"
            raise SettingError("fault", problem, "Set loader_workers to 1 or more")

    def fire(self, context: FaultContext) -> None:
        """Tell the workers how much they keep from now on."""
        self._wanted_bytes[0] += int(context.size() * MIB)
        context.add(leaked_mib=context.size())

    def act_in_worker(self) -> None:
        """Keep memory that is really written to, or the system would not really give it."""
        missing = self._wanted_bytes[0] - self._kept_bytes
        if missing > 0:
            self._kept.append(b"\x01" * missing)
            self._kept_bytes += missing
