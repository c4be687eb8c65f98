"""Which ranks are servers, which are workers, and which part of the weights each server holds.

Nothing here imports torch, so that wrong settings are refused at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


@dataclasses.dataclass(frozen=True)
class Layout:
    """The ranks of both kinds, in ascending order."""

    servers: range
    workers: range

    @staticmethod
    def of(settings: Settings, world_size: int) -> Layout:
        """Let the first or the last ranks be servers, all others workers."""
        if settings.server_ranks == "first":
            return Layout(range(settings.servers), range(settings.servers, world_size))
        num_workers = world_size - settings.servers
        return Layout(range(num_workers, world_size), range(num_workers))

    def describe(self, sizes: Sequence[int]) -> dict[str, str]:
        """Return which rank holds how many weights, for a checkpoint to agree on."""
        pieces = zip(self.servers, sizes, strict=True)
        return {"servers": ", ".join(f"rank {rank}: {size}" for rank, size in pieces)}


def can_recut(settings: Settings) -> bool:
    """Return whether other numbers of ranks may continue: only between steps that end for all."""
    return settings.consistency == "sync" and not settings.backup_workers


def shard_sizes(settings: Settings, num_weights: int) -> list[int]:
    """Cut the weights, as one long vector, into a piece for each server.

    The pieces follow `server_shares`: with "3,1" the first server holds three quarters.
    """
    shares = parse_shares(settings)
    borders = [round(num_weights * sum(shares[:end]) / sum(shares)) for end in range(len(shares))]
    return [end - start for start, end in zip(borders, [*borders[1:], num_weights], strict=True)]


def parse_shares(settings: Settings) -> list[float]:
    """Return the share of each server, equal ones if none are given. Raises SettingError."""
    if not settings.server_shares:
        return [1.0] * settings.servers
    try:
        shares = [float(text) for text in settings.server_shares.split(",")]
    except ValueError:
        shares = []
    if len(shares) != settings.servers or not all(0 < share < math.inf for share in shares):
        raise SettingError(
            "server_shares",
            f"{settings.server_shares!r} is not a share for each of {settings.servers} servers",
            'Give as many numbers above 0 as there are servers, for example "3,1" for 2',
        )
    return shares
