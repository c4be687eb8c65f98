"""Carriers: the transports by which reports travel beside the mesh, and how they are run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.model import LaunchVerdict, NodeReport, Trouble


class CarrierError(Exception):
    """The carrier cannot be used; the message says why and what to do."""


class Carrier(Protocol):
    """A side channel: a directory, a server, an ssh session."""

    name: ClassVar[str]

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Hand over our newest report and return those newer than `have` (versions by node).

        Called about twice a second. Raises CarrierError; it is reported once and tried again.
        """
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """A carrier that brings reports of many nodes without facts, and evaluates them itself."""

    is_evaluator: bool

    async def verdict(self, limit_s: float) -> LaunchVerdict | None:
        """Return its verdict, after all have ended or `limit_s`. Raises CarrierError."""
        ...


PAUSE_S = 0.5
VERDICT_LIMIT_S = 20.0  # for the slowest of 1,000 nodes to end, and the checks over them


async def carry(carrier: Carrier, exchange: Exchange, report: Callable[[Trouble], None]) -> None:
    """Exchange reports until cancelled; its first failure is reported, once."""
    is_reported = False
    while True:
        try:
            await exchange_once(carrier, exchange)
        except CarrierError as error:
            if not is_reported:
                report(Trouble(part=carrier.name, status="unknown", reason=str(error)))
            is_reported = True
        await asyncio.sleep(PAUSE_S)


async def exchange_once(carrier: Carrier, exchange: Exchange) -> None:
    """Hand over our report and take those of others. Raises CarrierError."""
    for report in await carrier.exchange(exchange.mine, exchange.have()):
        exchange.add(report)


async def server_verdict(carriers: Sequence[Carrier]) -> LaunchVerdict | None:
    """Ask the carrier that brought reports without facts for its verdict; None: there is none."""
    for carrier in carriers:
        if isinstance(carrier, Evaluator) and carrier.is_evaluator:
            with contextlib.suppress(CarrierError):
                return await carrier.verdict(VERDICT_LIMIT_S)
    return None
