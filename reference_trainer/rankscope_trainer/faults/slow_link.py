"""A rank behind a slow link, as a network card that fell back to a lower speed."""

import socket
from typing import ClassVar

from rankscope_trainer.faults.connections import UNLIMITED, limit_rate
from rankscope_trainer.faults.fault import FaultContext, Magnitude
from rankscope_trainer.faults.link import LinkFault

MIB = 2**20


class SlowLink(LinkFault):
    """The kernel lets each connection of the rank, or that with `peer`, send only so fast."""

    name: ClassVar[str] = "slow_link"
    finding: ClassVar[str] = "slow_link"
    default_size: ClassVar[Magnitude | None] = Magnitude(mib_per_second=1.0)
    size_is: ClassVar[str] = "rate of a connection"

    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Pace what is sent."""
        limit_rate(connection, int(context.size() * MIB))

    def heal(self, connection: socket.socket) -> None:
        """Lift the limit."""
        limit_rate(connection, UNLIMITED)
