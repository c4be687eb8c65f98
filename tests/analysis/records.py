"""Records that nearly every test of the analysis needs: ranks and groups of a small job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankscope.wire import schema

START_NS = 1_790_000_000_000_000_000


def registered(rank: int, world_size: int, **changes: Any) -> schema.RankRegistered:
    """Return the registration of a rank on one host, but for what changes."""
    values: dict[str, Any] = {
        "attempt": 0, "rank": rank, "time_ns": START_NS, "world_size": world_size,
        "local_rank": rank, "local_world_size": world_size, "node_rank": 0, "host": "node-0",
        "pid": 1 + rank,
    }  # fmt: skip
    return schema.RankRegistered(**values | changes)


def grouped(rank: int, ranks: Sequence[int], **changes: Any) -> schema.GroupDefined:
    """Return the definition of a process group by one of its members."""
    values: dict[str, Any] = {
        "attempt": 0, "rank": rank, "time_ns": START_NS, "group": "0", "ranks": list(ranks),
        "backend": "gloo", "description": "",
    }  # fmt: skip
    return schema.GroupDefined(**values | changes)
