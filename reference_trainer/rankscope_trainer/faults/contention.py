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
    """Busy processes run on the same core as the rank's training thread.

    That thread keeps to its core from the first step on, as launchers bind ranks: a rank that lost
    its other cores when it became slow would be slow because of that.
    """

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

    def prepare(self, rank: int) -> None:
        """Pin this thread to one core."""
        cores = sorted(os.sched_getaffinity(0))
        self._core = cores[rank % len(cores)]
        os.sched_setaffinity(0, {self._core})

    def begin(self, context: FaultContext) -> None:
        """Start the busy processes."""
        command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]
        # They inherit the core of the thread that starts them.
        self._busy = [subprocess.Popen(command) for _ in range(int(context.size()))]
        context.add(core=self._core)

    def end(self, context: FaultContext) -> None:
        """End the busy processes."""
        for process in self._busy:
            process.kill()
            process.wait()
