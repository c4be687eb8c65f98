"""What the faults of a link share: they act on the rank's connections, step after step."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.connections import connections, filter_refusal, lost_segments
from rankscope_trainer.faults.fault import Fault, FaultContext, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class LinkFault(Fault, ABC):
    """Changes all connections of the rank, or those with one peer, and puts them right again."""

    place: ClassVar[Place] = Place.STEP
    has_peer: ClassVar[bool] = True
    has_filter: ClassVar[bool] = False  # it attaches a socket filter, which not all machines allow

    def check(self, settings: Settings, world_size: int) -> None:
        """The socket options are those of Linux, filters may be refused, one rank has no link."""
        if sys.platform != "linux":
            raise SettingError("fault", f"{self.name} needs Linux", "Leave it out")
        if world_size < 2:
            raise SettingError("fault", f"{self.name}: one rank has no link", "Start two or more")
        refusal = filter_refusal() if self.has_filter else ""
        if refusal:
            raise SettingError(
                "fault", f"{self.name} needs socket filters, which are refused here ({refusal})",
                "Run as root or outside the sandbox, or leave it out",
            )  # fmt: skip

    def fire(self, context: FaultContext) -> None:
        """Change each connection; in every step, as a group that is made later brings more."""
        found = connections(context.peer)
        for connection in found:
            with connection:
                self.harm(connection, context)
        context.tell(connections=len(found))

    def end(self, context: FaultContext) -> None:
        """Put each connection right, and tell how many segments were lost on it so far."""
        for connection in connections(context.peer):
            with connection:
                self.heal(connection)
                context.add(segments_lost=lost_segments(connection))

    @abstractmethod
    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Change one connection."""

    @abstractmethod
    def heal(self, connection: socket.socket) -> None:
        """Put one connection right."""
