"""Faults of a link: they act on the TCP connections of a rank, step after step."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.connections import (
    UNLIMITED,
    connections,
    filter_refusal,
    limit_rate,
    lose_arriving,
    lose_nothing,
    lost_segments,
)
from rankscope_trainer.faults.fault import MIB, Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class LinkFault(Fault, ABC):
    """Changes all connections of the rank, or those with one peer, and restores them."""

    place = Place.STEP
    has_peer = True
    has_filter: ClassVar[bool] = False  # it attaches a socket filter, which not all machines allow

    def check(self, settings: Settings, world_size: int) -> None:
        """The socket options are those of Linux, filters may be refused, one rank has no link."""
        if sys.platform != "linux":
            raise SettingError("fault", f"{self.name} needs Linux", "Leave it out")
        if world_size < 2:
            raise SettingError("fault", f"{self.name}: one rank has no link", "Start two or more")
        refusal = filter_refusal() if self.has_filter else ""
        if refusal:
            problem = f"{self.name} needs socket filters, which are refused here ({refusal})"
            remedy = "Run as root or outside the sandbox, or leave it out"
            raise SettingError("fault", problem, remedy)

    def fire(self, context: FaultContext) -> None:
        """Change each connection; in every step, as a group that is made later brings more."""
        changed = connections(context.peer)
        for connection in changed:
            with connection:
                self.harm(connection, context)
        context.note(connections=len(changed))

    def end(self, context: FaultContext) -> None:
        """Restore each connection, and add up the segments that were lost on it so far."""
        for connection in connections(context.peer):
            with connection:
                self.heal(connection)
                context.add(segments_lost=lost_segments(connection))

    @abstractmethod
    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Change one connection."""

    @abstractmethod
    def heal(self, connection: socket.socket) -> None:
        """Restore one connection."""


class SlowLink(LinkFault):  # a network card that fell back to a lower speed
    """The kernel lets each connection of the rank, or that with `peer`, send only so fast."""

    name = "slow_link"
    finding = "slow_link"
    default_size = Magnitude(mib_per_second=1.0)
    size_is = "rate of a connection"

    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Pace what is sent."""
        limit_rate(connection, int(context.size() * MIB))

    def heal(self, connection: socket.socket) -> None:
        """Lift the limit."""
        limit_rate(connection, UNLIMITED)


class _LosingLink(LinkFault):
    has_filter = True

    def heal(self, connection: socket.socket) -> None:
        """Let everything through; what was lost is sent again."""
        lose_nothing(connection)


class LossyLink(_LosingLink):  # a bad cable, or an overrun switch
    """Part of what arrives at the rank, or from `peer`, is lost; TCP has to send it again."""

    name = "lossy_link"
    finding = "slow_link"
    default_size = Magnitude(share=0.1)
    size_is = "share of the segments"

    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Throw segments away by lot."""
        lose_arriving(connection, context.size())


class StoppedLink(_LosingLink):
    """Nothing reaches the rank any more, or nothing from `peer`; the connections stay open."""

    name = "stopped_link"
    finding = "hang"

    def harm(self, connection: socket.socket, context: FaultContext) -> None:
        """Throw every segment away, acknowledgements too."""
        lose_arriving(connection, 1.0)
