"""One interface for all ways by which reports travel beside the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

from rankscope.preflight.model import NodeReport, Verdict


class CarrierError(Exception):
    """The carrier cannot be used; the message says why and what to do."""


class Carrier(Protocol):
    """A side channel: a directory, a server, an ssh session."""

    name: ClassVar[str]

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Hand over our newest report and return those newer than `have` (versions by node).

        Called about twice a second. Raises CarrierError; it is told once and tried again.
        """
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


@runtime_checkable
class Judge(Protocol):
    """A carrier that, of many nodes, brings reports without facts: then it judges itself."""

    is_judge: bool

    async def verdict(self, limit_s: float) -> Verdict | None:
        """Return its verdict, after all have ended or `limit_s`. Raises CarrierError."""
        ...
