"""Runs a side channel beside the mesh."""

from __future__ import annotations

import asyncio

from rankscope.preflight.board.base import Carrier, CarrierError
from rankscope.preflight.board.board import Board
from rankscope.preflight.model import Trouble

PAUSE_S = 0.5


async def carry(carrier: Carrier, board: Board) -> None:
    """Exchange reports until cancelled; the first failure of the channel is told, once."""
    has_told = False
    while True:
        try:
            await exchange(carrier, board)
        except CarrierError as error:
            if not has_told:
                told = Trouble(part=carrier.name, status="unknown", reason=str(error))
                board.publish(troubles=(*board.mine.troubles, told))
            has_told = True
        await asyncio.sleep(PAUSE_S)


async def exchange(carrier: Carrier, board: Board) -> None:
    """Hand over our report and take those of others. Raises CarrierError."""
    for report in await carrier.exchange(board.mine, board.have()):
        board.add(report)
