"""A rendezvous that cannot open, because another program has its port."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

# Listens until this rank, whose pipe it reads, is gone.
HOLDER = """
import socket, sys
held = socket.create_server(("", 0))
print(held.getsockname()[1], flush=True)
sys.stdin.read()
"""


class PortInUse(Fault):
    """Another process listens on the port at which rank 0 wants to open the rendezvous."""

    name: ClassVar[str] = "port_in_use"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.START

    def check(self, settings: Settings, world_size: int) -> None:
        """A rank without a launcher meets nobody."""
        if world_size < 2:
            raise SettingError("fault", "port_in_use: one rank needs no port", "Start two or more")

    def is_due(self, context: FaultContext) -> bool:
        """Only rank 0 opens the rendezvous; the others come to it."""
        return context.rank == 0

    def fire(self, context: FaultContext) -> None:
        """Let a process take a port, and name that port as the meeting place.

        torchrun itself listens on its own, so rank 0 is told to open one, as `env://` does
        without torchrun.
        """
        self._holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        port = int(self._holder.stdout.readline())
        context.tell(port=port, holder_pid=self._holder.pid)
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
