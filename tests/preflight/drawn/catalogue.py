"""All kinds: drawn faults, healthy ones, the first laboratory's; the draw of one by its seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from tests.preflight.drawn import data, filters, healthy, holes, launches, machines, routes
from tests.preflight.drawn.world import Case, Kind, Place, Wanted, World, draw_world
from tests.preflight.faults import FAULTS, Fault
from tests.preflight.scene import MASTER_PORT

_FAMILIES = (data, holes, filters, launches, routes, machines)
KINDS: dict[str, Kind] = {
    name: kind for family in _FAMILIES for name, kind in family.KINDS.kinds.items()
}

HEALTHY: dict[str, Kind] = healthy.KINDS.kinds


def _written(fault: Fault) -> Kind:
    """Return a fault of the first laboratory, of which there is one place and one size."""
    (expected,) = fault.expected
    pairs = expected.edges and frozenset(frozenset(edge) for edge in expected.edges)
    nodes = None if expected.nodes is None and not pairs else expected.nodes
    place = (Place(nodes=nodes, pairs=pairs or None),) if nodes is not None or pairs else ()
    case = Case(
        fault.says, fault.build, Wanted(frozenset((expected.id,)), place, (expected.status,)),
        also=fault.also, options=fault.options, job=_JOBS.get(fault.job, fault.job),
        wire=fault.wire, mtu=fault.mtu, is_default=True, is_user=fault.is_user,
        has_torch=fault.needs_torch, agree=fault.agree,
    )  # fmt: skip
    mode = (*fault.modes, "static")[0]
    return Kind(
        fault.name, "written", "breaks" if expected.status == "fail" else "works",
        lambda world, rng: case, is_timed=fault.is_timed, needs=fault.needs,
        world=World(3, fault.net, (1, 2, 3), MASTER_PORT, mode),
    )  # fmt: skip


_JOBS = {"--loader": "loader", "--checkpoint {shared}": "checkpoint", "--checkpoint {full}": ""}
WRITTEN: dict[str, Kind] = {fault.name: _written(fault) for fault in FAULTS}


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
    world = kind.world or draw_world(rng, kind.mode, kind.net)
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
