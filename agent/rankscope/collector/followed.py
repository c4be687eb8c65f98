"""What belongs to one rank directory."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.collector.lives import Life
from rankscope.collector.ranks import FollowedRank
from rankscope.collector.stacks import StackTaker


@dataclass
class Followed:
    """One rank: its files, its life, its stacks."""

    rank: FollowedRank
    life: Life
    stacks: StackTaker
    failures: int = 0
    has_more: bool = False
    is_drained: bool = False  # gone, and read to the end
