"""A rank behind a link that carries nothing any more, without an error on either side."""

import socket
from typing import ClassVar

from rankscope_trainer.faults.connections import lose_arriving, lose_nothing
from rankscope_trainer.faults.fault import FaultContext
from rankscope_trainer.faults.link import LinkFault


class StoppedLink(LinkFault):
    """Nothing reaches the rank any more, or nothing from `peer`; the connections stay open."""

    name: ClassVar[str] = "stopped_link"
    finding: ClassVar[str] = "hang"
    has_filter: ClassVar[bool] = True

    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Throw every segment away, acknowledgements too."""
        lose_arriving(connection, 1.0)

    def heal(self, connection: socket.socket) -> None:
        """Let everything through; what was lost is sent again."""
        lose_nothing(connection)
