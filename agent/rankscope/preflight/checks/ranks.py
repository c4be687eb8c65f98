"""Whether the ranks of all nodes fit together: RANK, LOCAL_WORLD_SIZE and WORLD_SIZE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.preflight.checks.base import Run
from rankscope.preflight.model import Confidence

_BY_HAND = ("env", "kubernetes")  # schedulers deal ranks out as they were asked, also in turns


@dataclass(frozen=True)
class Block:
    """The ranks of one node, as its variables say: from `first`, `size` of them."""

    first: int
    size: int | None  # None: nothing says how many


def blocks(run: Run) -> dict[str, Block]:
    """Return the ranks of the nodes whose variables were set by hand."""
    return {
        node: Block(launch.rank - (launch.local_rank or 0), launch.nproc_per_node)
        for node, launch in run.launches.items()
        if launch.launcher in _BY_HAND and launch.mode == "env" and launch.rank is not None
    }


def overlapping(found: Mapping[str, Block]) -> dict[str, int]:
    """Return the nodes that begin within the ranks of the node before, with where they should."""
    wrong: dict[str, int] = {}
    due = 0
    rows = sorted(found.items(), key=lambda item: item[1].first)
    for node, block in rows:
        if block.first < due:
            wrong[node] = due
        due = max(due, block.first) if node in wrong else block.first
        due += block.size or 1
    return wrong


def implied_sizes(found: Mapping[str, Block], world_size: int) -> dict[str, int]:
    """Return how many ranks each node would have for all numbers to be there."""
    rows = sorted(found.items(), key=lambda item: item[1].first)
    ends = [block.first for _, block in rows[1:]] + [world_size]
    return {node: end - block.first for (node, block), end in zip(rows, ends, strict=True)}


@dataclass(frozen=True)
class Fault:
    """What is wrong with the numbers, about whom, and the variables that mend it."""

    title: str
    nodes: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]  # (node, command); "": on every node
    unless: str = ""
    confidence: Confidence = "proven"


def fault_of(run: Run, found: Mapping[str, Block], world_size: int) -> Fault | None:
    """Return what is wrong with the ranks of all nodes; None if they fit."""
    first = min(block.first for block in found.values())
    if first > 0:
        return Fault(
            f"no node has rank 0: RANK begins at {first}",
            tuple(found), _numbered(found, _usual_size(found)),
        )  # fmt: skip
    if wrong := overlapping(found):
        node, due = next(iter(wrong.items()))
        return Fault(
            f"{node} begins at RANK {found[node].first}, but ranks below {due} are those of "
            "the node before",
            tuple(wrong),
            tuple((one, f"export RANK={number}") for one, number in wrong.items()),
            unless="the ranks are dealt out to the nodes in turns",
            confidence="likely",
        )
    return _misfit(run, found, world_size)


def _misfit(run: Run, found: Mapping[str, Block], world_size: int) -> Fault | None:
    """Return where WORLD_SIZE and the first ranks leave a node more or fewer ranks than it has."""
    implied = implied_sizes(found, world_size)
    if any(size < 1 for size in implied.values()):
        return None  # RANK >= WORLD_SIZE: env.complete
    said = {node: block.size for node, block in found.items()}
    if None not in said.values():
        if said == implied:
            return None
        total = sum(size for size in said.values() if size)
        if all(said[node] == size for node, size in list(implied.items())[:-1]):
            title = f"WORLD_SIZE is {world_size}, and the nodes run {total} ranks"
            return Fault(title, (), (("", f"export WORLD_SIZE={total}"),))
        gap = next(node for node, size in implied.items() if size != said[node])
        after = list(implied)[list(implied).index(gap) + 1]
        title = f"no node has rank {found[gap].first + (said[gap] or 1)}: {after} begins at RANK "
        return Fault(
            f"{title}{found[after].first}", (after,), _numbered(found, said[gap] or 1, after)
        )
    if len(set(implied.values())) == 1 or implied == {n: run.nproc(n) for n in found}:
        return None
    sizes = list(implied.values())
    usual = max(set(sizes), key=sizes.count)
    odd = next(node for node, size in implied.items() if size != usual)
    return Fault(
        f"WORLD_SIZE is {world_size}: with these ranks {odd} would run {implied[odd]}, "
        f"and others {usual}",
        () if odd == list(implied)[-1] else (odd,),
        (("", f"export WORLD_SIZE={usual * len(found)}"), *_numbered(found, usual, after=odd)[1:]),
        unless=f"{odd} is meant to run {implied[odd]} ranks: set LOCAL_WORLD_SIZE there",
        confidence="likely",
    )


def _usual_size(found: Mapping[str, Block]) -> int:
    return next((block.size for block in found.values() if block.size), 1)


def _numbered(
    found: Mapping[str, Block], size: int, after: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return the numbers of the nodes in their order, from `after` on."""
    rows = sorted(found, key=lambda node: found[node].first)
    start = rows.index(after) if after else 0
    return tuple(
        (node, f"export RANK={place * size}") for place, node in enumerate(rows) if place >= start
    )
