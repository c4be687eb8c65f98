"""What checks over all nodes share: which node differs from the majority, and from what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from rankscope.preflight.checks.base import listed

Value = TypeVar("Value")
_MAX_LINES = 12  # values that are listed one by one


def by_value(values: Mapping[str, Value]) -> dict[Value, tuple[str, ...]]:
    """Return the nodes of each value, the most frequent value first."""
    groups: dict[Value, list[str]] = defaultdict(list)
    for node, value in values.items():
        groups[value].append(node)
    frequent = sorted(groups.items(), key=lambda item: -len(item[1]))
    return {value: tuple(nodes) for value, nodes in frequent}


def odd_ones(values: Mapping[str, Value]) -> tuple[str, ...]:
    """Return the nodes that differ from the majority; with no majority every node, for a tie.

    Empty: all say the same.
    """
    groups = list(by_value(values).values())
    if len(groups) < 2:
        return ()
    has_majority = 2 * len(groups[0]) > len(values)
    return tuple(node for nodes in groups[1 if has_majority else 0 :] for node in nodes)


def compared(values: Mapping[str, Value]) -> tuple[str, ...]:
    """Return one line for each value: "2.13.0: node0, node1", the most frequent first."""
    lines = [f"{value}: {listed(nodes)}" for value, nodes in by_value(values).items()]
    rest = len(lines) - _MAX_LINES
    return tuple([*lines[:_MAX_LINES], f"and {rest} more values"] if rest > 0 else lines)
