"""A rank behind a link that loses packets, as with a bad cable or an overrun switch."""

import socket
from typing import ClassVar

from rankscope_trainer.faults.connections import lose_arriving, lose_nothing
from rankscope_trainer.faults.fault import FaultContext, Magnitude
from rankscope_trainer.faults.link import LinkFault


class LossyLink(LinkFault):
    """Part of what arrives at the rank, or from `peer`, is lost; TCP has to send it again."""

    name: ClassVar[str] = "lossy_link"
    finding: ClassVar[str] = "slow_link"
    default_size: ClassVar[Magnitude | None] = Magnitude(share=0.1)
    size_is: ClassVar[str] = "share of the segments"
    has_filter: ClassVar[bool] = True

    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Throw segments away by lot."""
        lose_arriving(connection, context.size())

    def heal(self, connection: socket.socket) -> None:
        """Let everything through."""
        lose_nothing(connection)
