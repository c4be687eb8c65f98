"""A rank that shares its core with somebody else's work."""

import os
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

# Computes until the rank is gone; without site-packages, so that nothing watches it.
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


class Contention(Fault):
    """Busy processes run on the same core as the rank's training thread."""

    name: ClassVar[str] = "contention"
    finding: ClassVar[str] = "host_contention"
    place: ClassVar[Place] = Place.STEP
    default_size: ClassVar[Magnitude | None] = Magnitude(count=2)
    size_is: ClassVar[str] = "busy processes"

    def check(self, settings: "Settings", world_size: int) -> None:
        """Only some systems let a thread be pinned."""
        if not hasattr(os, "sched_setaffinity"):
            problem = "contention needs a system with sched_setaffinity, such as Linux"
            raise SettingError("fault", problem, "Leave it out here")

    def begin(self, context: FaultContext) -> None:
        """Pin this thread to one core, and the busy processes to the same."""
        self._cores = os.sched_getaffinity(0)
        core = sorted(self._cores)[context.rank % len(self._cores)]
        os.sched_setaffinity(0, {core})
        command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]
        # They inherit the core of the thread that starts them.
        self._busy = [subprocess.Popen(command) for _ in range(int(context.size()))]
        context.add(core=core)

    def end(self, context: FaultContext) -> None:
        """End the busy processes and let the thread run where it could before."""
        for process in self._busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, self._cores)
