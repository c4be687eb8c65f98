"""What ranks of a map belong to: their node, their stage, the process groups of each kind."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.groups.mesh import WHOLE, Family, families_of
from rankscope_server.api.groups.stored import groups_of
from rankscope_server.api.kept import Kept
from rankscope_server.api.steps.lanes import Array, Lanes, label_of
from rankscope_server.api.steps.schema import MapBand
from rankscope_server.store import tables

GROUP = "group:"
MAX_FAMILIES = 6


@dataclass(frozen=True, slots=True)
class Membership:
    """One way to divide the ranks; its key is also the order in which members stand together."""

    key: str
    title: str
    names: list[str]
    codes: Array  # per rank a place in `names`; -1: of none, or not known


_kept: Kept[list[Membership]] = Kept(most=32)


def memberships(
    connection: sa.Connection, run: sa.Row[Any], hosts: Sequence[str], stages: Sequence[int]
) -> list[Membership]:
    """Return the ways to divide the ranks of a run, each with two groups or more."""
    known = {rank: stage for rank, stage in enumerate(stages) if stage >= 0}
    named = {stage: f"Stage {stage}" for stage in sorted(set(known.values()))}
    ways = [
        _membership("node", "Node", {host: host for host in dict.fromkeys(hosts) if host}, hosts),
        _membership("stage", "Pipeline stage", named, stages),
        *_families(connection, run, known, len(hosts)),
    ]
    return [way for way in ways if len(way.names) > 1 or ((way.codes < 0).any() and way.names)]


def _membership(
    key: str, title: str, named: Mapping[Any, str], of_ranks: Sequence[Hashable]
) -> Membership:
    places = {value: place for place, value in enumerate(named)}
    codes = np.array([places.get(value, -1) for value in of_ranks], np.int32)
    return Membership(key, title, list(named.values()), codes)


def _families(
    connection: sa.Connection, run: sa.Row[Any], stage_of: Mapping[int, int], height: int
) -> list[Membership]:
    """Return the kinds of process groups; kept until another group is recorded."""
    table = tables.process_group.c
    version = connection.execute(
        sa.select(sa.func.count(), sa.func.sum(sa.func.length(table.ranks))).where(
            table.run_id == run.run_id, table.attempt == run.attempt
        )
    ).one()

    def make() -> list[Membership]:
        families = families_of(groups_of(connection, run), height, stage_of)
        return list(_of_families(families, height))

    key = (str(connection.engine.url), run.run_id, run.attempt)
    return _kept.get(key, (*version, height, len(set(stage_of.values()))), make)


def _of_families(families: Sequence[Family], height: int) -> Iterator[Membership]:
    seen: set[str] = set()
    for family in [one for one in families if one.name != WHOLE][:MAX_FAMILIES]:
        name = family.name if family.name not in seen else f"{family.name} {family.size}"
        seen.add(name)
        codes = np.full(height, -1, np.int32)
        for place, group in enumerate(family.groups):
            codes[[rank for rank in group.ranks if rank < height]] = place
        names = [label_of(np.sort(group.ranks)) for group in family.groups]
        yield Membership(f"{GROUP}{name}", f"{name[:1].upper()}{name[1:]} group", names, codes)


def groups_by_order(ways: Sequence[Membership]) -> dict[str, tuple[Sequence[str], Array]]:
    """Return what `Ranks.groups` holds: kinds of process groups."""
    return {way.key: (way.names, way.codes) for way in ways if way.key.startswith(GROUP)}


def map_bands(ways: Sequence[Membership], lanes: Lanes, pinned: Sequence[int]) -> list[MapBand]:
    """Return for each way the group of every lane, none where its ranks are of several."""
    return [_band(way, lanes, pinned) for way in ways]


def _band(way: Membership, lanes: Lanes, pinned: Sequence[int]) -> MapBand:
    of_lanes = []
    for own in lanes.parts():
        codes = way.codes[own]
        of_lanes.append(int(codes[0]) if (codes == codes[0]).all() else -1)
    of_pins = way.codes[list(pinned)].tolist() if pinned else []
    used = sorted({code for code in (*of_lanes, *of_pins) if code >= 0})
    place = {code: at for at, code in enumerate(used)}
    return MapBand(
        key=way.key,
        title=way.title,
        names=[way.names[code] for code in used],
        lanes=[place.get(code, -1) for code in of_lanes],
        pins=[place.get(code, -1) for code in of_pins],
    )
