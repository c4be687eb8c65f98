"""The device mesh of a job, from its process groups: its axes and the coordinates of each rank.

Groups of one kind share no rank and are alike: a *family*. A family whose groups hold every rank is
an axis of the mesh, unless others span it already: groups of tensor and pipeline ranks together
say nothing that those of each did not. Coordinates are the places of a rank in its groups.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope_server.text import NO_GROUP_NAMES, group_text, plural

# Words in the names and descriptions of groups: DeviceMesh's dimensions are named by scripts,
# Megatron-LM and DeepSpeed describe their groups with these.
_WORDS = {
    "data": ("data", "dp", "ddp", "replicate", "replica", "replicas"),
    "shard": ("shard", "fsdp", "sharded", "hsdp"),
    "tensor": ("tensor", "tp"),
    "pipeline": ("pipeline", "pipe", "pp", "stage", "stages"),
    "context": ("context", "cp", "sequence", "sp"),
    "expert": ("expert", "experts", "ep", "moe"),
}
_AXIS_OF = {word: axis for axis, words in _WORDS.items() for word in words}
WHOLE = "all ranks"
_LATE = "expert"  # its groups lie across the others: the axes are those without it, where they can


@dataclass(frozen=True, slots=True)
class Group:
    """One process group; its ranks in its own order."""

    name: str
    ranks: tuple[int, ...]
    backend: str = ""
    description: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the kinds of parallelism that its description names, else its name."""
        text = self.name if self.description in NO_GROUP_NAMES else self.description
        tokens = re.split(r"[^a-z]+", text.lower())
        return tuple(dict.fromkeys(_AXIS_OF[token] for token in tokens if token in _AXIS_OF))


@dataclass(slots=True)
class Family:
    """Groups of one kind; several groups of the same ranks count once."""

    name: str
    groups: list[Group]
    also: list[Group] = field(default_factory=list)  # of the same ranks as one of `groups`
    is_axis: bool = False

    @property
    def size(self) -> int:
        """Return how many ranks the first of its groups has; all of an axis have as many."""
        return len(self.groups[0].ranks)

    @property
    def apart(self) -> int:
        """Return how far the first two ranks of a group are apart."""
        first = sorted(self.groups[0].ranks)
        return first[1] - first[0] if len(first) > 1 else 0

    def text(self, world_size: int) -> str:
        """Return "16 groups of 8 ranks, the first: ranks 0 to 7"."""
        shown = group_text(list(self.groups[0].ranks), world_size)
        if len(self.groups) == 1:
            return shown
        return f"{len(self.groups):,} groups of {plural(self.size, 'rank')}, the first: {shown}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A direction of the mesh; without a family no group runs along it."""

    name: str
    size: int
    family: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes, the outermost first, and the coordinates of each rank."""

    axes: tuple[Axis, ...]
    at: Mapping[int, tuple[int, ...]]


def families_of(
    groups: Iterable[Group], world_size: int, stage_of: Mapping[int, int]
) -> list[Family]:
    """Return the groups of two ranks and more by kind, those with the fewest ranks first.

    The whole job is a kind of its own. `stage_of` are the places of ranks in a pipeline.
    """
    num_stages = len({stage for stage in stage_of.values() if stage >= 0})
    by_ranks: dict[frozenset[int], list[Group]] = defaultdict(list)
    for group in groups:
        if len(group.ranks) > 1:
            by_ranks[frozenset(group.ranks)].append(group)
    kinds: dict[tuple[str, object], list[list[Group]]] = defaultdict(list)
    for ranks, same in by_ranks.items():
        same.sort(key=lambda group: (not group.words, len(group.words), group.name))
        name = _name_of(ranks, same[0], world_size, stage_of, num_stages)
        kinds[name, () if name else _shape(same[0].ranks)].append(same)
    found = [family for (name, _), alike in kinds.items() for family in _of_size(name, alike)]
    found.sort(key=lambda family: (family.size, family.apart, family.name))
    return found


def _name_of(
    ranks: frozenset[int],
    group: Group,
    world_size: int,
    stage_of: Mapping[int, int],
    num_stages: int,
) -> str:
    if len(ranks) == num_stages and len({stage_of.get(rank, -1) for rank in ranks}) == num_stages:
        return "pipeline"
    if group.words:
        return " and ".join(group.words)
    return WHOLE if len(ranks) == world_size else ""


def _shape(ranks: Sequence[int]) -> object:
    """Return how far each rank is from the next; of a comb its length and pitch."""
    ordered = sorted(ranks)
    steps = tuple(b - a for a, b in itertools.pairwise(ordered))
    return (len(ordered), steps[0]) if len(set(steps)) == 1 else steps


def _of_size(name: str, alike: Sequence[list[Group]]) -> list[Family]:
    """Return families whose groups all have as many ranks."""
    by_size: dict[int, list[list[Group]]] = defaultdict(list)
    for same in alike:
        by_size[len(same[0].ranks)].append(same)
    found = []
    for of_size in by_size.values():
        of_size.sort(key=lambda same: min(same[0].ranks))
        family = Family(name, [same[0] for same in of_size])
        family.also = [group for same in of_size for group in same[1:]]
        if not name:
            family.name = f"{family.apart} apart"
        found.append(family)
    return found


def layout_of(
    families: Sequence[Family], ranks: Sequence[int], stage_of: Mapping[int, int]
) -> Layout:
    """Return the mesh of some ranks; marks the families that are axes.

    Where the groups span no mesh, all ranks lie on one axis.
    """
    component = {rank: rank for rank in ranks}

    def root(rank: int) -> int:
        while component[rank] != rank:
            component[rank] = component[component[rank]]
            rank = component[rank]
        return rank

    whole = set(ranks)
    order = sorted(range(len(families)), key=lambda i: (_LATE in families[i].name, i))
    chosen = []
    for place in order:
        family = families[place]
        if not _holds_each(family, whole) or not _is_new(family, root):
            continue
        for group in family.groups:
            for rank in group.ranks[1:]:
                component[root(rank)] = root(group.ranks[0])
        chosen.append(place)
    parts = {one: i for i, one in enumerate(sorted({root(rank) for rank in ranks}))}
    columns = [(families[place], place, _places(families[place], stage_of)) for place in chosen]
    axes = [
        (_pitch(at), Axis(family.name, family.size, place), at) for family, place, at in columns
    ]
    if len(parts) > 1:
        rest = {rank: parts[root(rank)] for rank in ranks}
        axes.append((_pitch(rest), Axis("no group" if axes else "rank", len(parts), None), rest))
    axes.sort(key=lambda axis: -axis[0])
    at = {rank: tuple(places[rank] for _, _, places in axes) for rank in ranks}
    if len(set(at.values())) < len(ranks):  # groups that lie across each other
        return Layout(
            (Axis("rank", len(ranks), None),), {rank: (i,) for i, rank in enumerate(ranks)}
        )
    for place in chosen:
        families[place].is_axis = True
    return Layout(tuple(axis for _, axis, _ in axes), at)


def _holds_each(family: Family, ranks: set[int]) -> bool:
    members = [rank for group in family.groups for rank in group.ranks]
    return len(members) == len(ranks) and set(members) == ranks


def _is_new(family: Family, root: Callable[[int], int]) -> bool:
    """Return whether no two ranks of a group are joined by the axes that there are."""
    return all(len(set(map(root, group.ranks))) == len(group.ranks) for group in family.groups)


def _places(family: Family, stage_of: Mapping[int, int]) -> dict[int, int]:
    """Return the place of each rank in its group; along a pipeline the order of the stages."""
    is_pipeline = family.name == "pipeline"
    found = {}
    for group in family.groups:
        order = sorted(group.ranks, key=lambda rank: stage_of.get(rank, 0)) if is_pipeline else None
        for place, rank in enumerate(order or group.ranks):
            found[rank] = place
    return found


def _pitch(at: Mapping[int, int]) -> int:
    """Return how far apart the first two ranks on an axis are: far for the outermost."""
    first = next((rank for rank in sorted(at) if at[rank] == 0), 0)
    second = next((rank for rank in sorted(at) if at[rank] == 1), first)
    return second - first
