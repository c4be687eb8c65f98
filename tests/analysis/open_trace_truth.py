"""What the open trace says of itself, by a computation that shares no line with the product.

Each rank goes through its operations in order. Self time takes its time; an exchange or a
collective ends when its last member has come, and the shortest time of it has passed. Ideal is: the
mean of a kind of work, the median of a kind of transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Node: TypeAlias = tuple[Any, ...]
_WORK = frozenset({"forward-compute", "backward-compute", "optimizer", "gc",
                   "layernorm-grads-all-reduce"})  # fmt: skip
_EXCHANGES = {"forward-send": ("forward", 0), "forward-recv": ("forward", -1),
              "backward-send": ("backward", 0), "backward-recv": ("backward", 1)}  # fmt: skip
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")


class Truth:
    """The operations of a trace, ready to be replayed with other durations, in seconds."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path, columns=list(_COLUMNS))
        rows = list(zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True))
        self.steps = sorted({row[3] for row in rows})
        self.took = _durations(rows)
        self.programs = _programs(rows)

    def step_seconds(self, durations: Mapping[Node, float]) -> float:
        """Return how long a step takes with these durations."""
        members: dict[Node, set[int]] = defaultdict(set)
        for rank, program in self.programs.items():
            for node in (node for batch in program for node in batch):
                members[node].add(rank)
        now, at = dict.fromkeys(self.programs, 0.0), dict.fromkeys(self.programs, 0)
        came: dict[Node, dict[int, float]] = defaultdict(dict)
        moved = True
        while moved:
            moved = False
            for rank, program in self.programs.items():
                while at[rank] < len(program):
                    batch = program[at[rank]]
                    for node in batch:
                        came[node].setdefault(rank, now[rank])
                    if any(len(came[node]) < len(members[node]) for node in batch):
                        break
                    now[rank] = max(max(came[node].values()) + durations[node] for node in batch)
                    at[rank], moved = at[rank] + 1, True
        assert all(at[rank] == len(program) for rank, program in self.programs.items())
        return max(now.values())

    def mean_step_seconds(self) -> float:
        """Return the mean step as recorded."""
        return float(np.mean([self.step_seconds(self._recorded(step)) for step in self.steps]))

    def ideal_step_seconds(self) -> float:
        """Return the step if all ranks did each kind of operation equally fast."""
        of_kind: dict[Node, list[float]] = defaultdict(list)
        for node, took in self.took.items():
            of_kind[_kind(node)] += took.values()
        ideal = {
            kind: float(np.mean(took) if kind[0] == "work" else np.median(took))
            for kind, took in of_kind.items()
        }
        return self.step_seconds({node: ideal[_kind(node)] for node in self.took})

    def step_seconds_without(self, rank: int, peers: tuple[int, ...]) -> float:
        """Return the mean step if a rank had worked as the median of its peers."""
        times = []
        for step in self.steps:
            durations = self._recorded(step)
            for node in [node for node in durations if node[:2] == ("work", rank)]:
                durations[node] = float(
                    np.median([self.took["work", peer, *node[2:]][step] for peer in peers])
                )
            times.append(self.step_seconds(durations))
        return float(np.mean(times))

    def _recorded(self, step: int) -> dict[Node, float]:
        return {node: took[step] for node, took in self.took.items()}


def _node(row: tuple[Any, ...]) -> Node:
    replica, stage, rank, _, kind, _, _, number = row
    if kind in _WORK:
        return "work", rank, kind, number
    if kind in _EXCHANGES:
        name, shift = _EXCHANGES[kind]
        return name, replica, stage + shift, number
    if kind in ("params-all-gather", "grads-reduce-scatter"):
        return kind, stage, number
    return kind, replica, number


def _kind(node: Node) -> Node:
    return ("work", node[2]) if node[0] == "work" else (node[0],)


def _durations(rows: list[tuple[Any, ...]]) -> dict[Node, dict[int, float]]:
    parts: dict[tuple[int, Node], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        parts[row[3], _node(row)].append((row[5], row[6]))
    found: dict[Node, dict[int, float]] = defaultdict(dict)
    for (step, node), times in parts.items():
        last = max(began + took for began, took in times) - max(began for began, _ in times)
        found[node][step] = times[0][1] if node[0] == "work" else max(0.0, last)
    return found


def _programs(rows: list[tuple[Any, ...]]) -> dict[int, list[list[Node]]]:
    """Return what each rank does in order; exchanges that begin together are one entry."""
    began: dict[tuple[int, Node, bool], list[float]] = defaultdict(list)
    number_of: dict[tuple[int, Node, bool], int] = {}
    for row in rows:
        key = (row[2], _node(row), row[4] in _EXCHANGES)
        began[key].append(row[5])
        number_of.setdefault(key, len(number_of))
    found: dict[int, list[list[Node]]] = defaultdict(list)
    last: dict[int, tuple[float, bool]] = {}
    for key in sorted(began, key=lambda one: (float(np.median(began[one])), number_of[one])):
        rank, node, is_exchange = key
        at = float(np.median(began[key]))
        if is_exchange and last.get(rank) == (at, True):
            found[rank][-1].append(node)
        else:
            found[rank].append([node])
        last[rank] = (at, is_exchange)
    return found
