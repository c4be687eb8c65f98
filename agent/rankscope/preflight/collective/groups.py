"""Which nodes run the smoke test together."""

from __future__ import annotations

from collections.abc import Sequence

# gloo connects every pair at init: 64 nodes open 2,016 connections, 1,000 would open 499,500 and
# spend the whole budget on it. Groups run at the same time, and each node is in one.
MAX_TOGETHER = 64


def group_of(node: str, names: Sequence[str], limit: int = MAX_TOGETHER) -> tuple[str, ...]:
    """Return those who run together with `node`; the first of them holds the store.

    Groups are neighbours in `names` and of nearly one size, so that none is a single node.
    """
    num_groups = -(-len(names) // limit)
    at = names.index(node) * num_groups // len(names)
    return tuple(name for i, name in enumerate(names) if i * num_groups // len(names) == at)
