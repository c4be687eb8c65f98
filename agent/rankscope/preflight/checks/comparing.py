"""What checks over all nodes share: who is the odd one out, who was not measured, how to list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from rankscope.preflight.checks.base import Run
from rankscope.preflight.model import Finding, Status

Value = TypeVar("Value")
_MAX_LISTED = 4  # names in a title; the finding itself holds them all
_MAX_LINES = 12  # values that are told one by one


def listed(nodes: Collection[str]) -> str:
    """Return names for a title: "node1, node2", or "node1, node2, node3, node4 and 60 more"."""
    names = list(nodes)
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_MAX_LISTED])} and {len(names) - _MAX_LISTED} more"


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


def not_measured(id: str, run: Run, part: str) -> Iterator[Finding]:
    """Yield a finding for each reason why nodes lack a part of the facts."""
    without: dict[tuple[Status, str], list[str]] = defaultdict(list)
    for report in run.present:
        if getattr(report.facts, part) is not None:
            continue
        told = [t for t in report.troubles if t.part == part]
        status: Status = told[0].status if told else "unknown"
        reason = told[0].reason if told else f"its report holds nothing about {part}"
        without[status, reason].append(report.node)
    for (status, reason), nodes in without.items():
        title = f"{listed(nodes)}: {reason}"
        yield Finding(id=id, status=status, nodes=tuple(nodes), title=title)
