"""All kinds of faults, and the draw of one by its seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from tests.preflight.drawn import data, healthy, holes, launches, machines, routes
from tests.preflight.drawn.world import Case, Kind, World, draw_world

_FAMILIES = (data, holes, launches, routes, machines)
KINDS: dict[str, Kind] = {
    name: kind for family in _FAMILIES for name, kind in family.KINDS.kinds.items()
}

HEALTHY: dict[str, Kind] = healthy.KINDS.kinds


@dataclass(frozen=True)
class Draw:
    """One fault, as its seed has it."""

    seed: int
    kind: Kind
    world: World
    case: Case


def draw(kind: Kind, seed: int) -> Draw:
    """Draw a place and a size; the same seed draws the same."""
    rng = random.Random(f"{kind.name}:{seed}")
    world = draw_world(rng, kind.mode, kind.net)
    return Draw(seed, kind, world, kind.draw(world, rng))


def draws(count: int, seed: int, kinds: Collection[Kind]) -> list[Draw]:
    """Draw `count` times: all kinds in turn, in a shuffled order, until there are enough."""
    rng = random.Random(seed)
    chosen: list[Kind] = []
    while len(chosen) < count:
        deck = sorted(kinds, key=lambda kind: kind.name)
        rng.shuffle(deck)
        chosen += deck
    return [draw(kind, rng.randrange(1 << 31)) for kind in chosen[:count]]
