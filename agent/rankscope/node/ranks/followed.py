"""What belongs to one rank directory."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.node.processes.stacks import StackTaker
from rankscope.node.ranks.lives import Life
from rankscope.node.ranks.rank import FollowedRank


@dataclass
class Followed:
    """One rank: its files, its life, its stacks."""

    rank: FollowedRank
    life: Life
    stacks: StackTaker
    failures: int = 0
    has_more: bool = False
    is_drained: bool = False  # gone, and read to the end
