"""Who runs the smoke test together."""

from __future__ import annotations

import pytest

from rankscope.preflight.collective.schedule import MAX_TOGETHER, group_of


@pytest.mark.parametrize("num_nodes", [1, 2, 64, 65, 129, 1000])
def test_every_node_is_in_one_group_of_bounded_size(num_nodes: int) -> None:
    names = [f"n{number}" for number in range(num_nodes)]
    groups = {group_of(name, names) for name in names}
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert all(name in group_of(name, names) for name in names)
    sizes = [len(group) for group in groups]
    assert max(sizes) <= MAX_TOGETHER
    assert max(sizes) - min(sizes) <= 1
