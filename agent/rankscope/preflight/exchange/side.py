"""Runs a side channel beside the mesh."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from rankscope.preflight.exchange.base import Carrier, CarrierError, Judge
from rankscope.preflight.exchange.board import Board
from rankscope.preflight.model import Trouble, Verdict

PAUSE_S = 0.5
VERDICT_LIMIT_S = 20.0  # for the slowest of 1,000 nodes to end, and the checks over them


async def carry(carrier: Carrier, board: Board, tell: Callable[[Trouble], None]) -> None:
    """Exchange reports until cancelled; the first failure of the channel is told, once."""
    has_told = False
    while True:
        try:
            await exchange(carrier, board)
        except CarrierError as error:
            if not has_told:
                tell(Trouble(part=carrier.name, status="unknown", reason=str(error)))
            has_told = True
        await asyncio.sleep(PAUSE_S)


async def exchange(carrier: Carrier, board: Board) -> None:
    """Hand over our report and take those of others. Raises CarrierError."""
    for report in await carrier.exchange(board.mine, board.have()):
        board.add(report)


async def judged_elsewhere(carriers: Sequence[Carrier]) -> Verdict | None:
    """Ask the carrier that brought reports without facts: they are no ground to judge on."""
    for carrier in carriers:
        if isinstance(carrier, Judge) and carrier.is_judge:
            with contextlib.suppress(CarrierError):
                return await carrier.verdict(VERDICT_LIMIT_S)
    return None
