"""How the ranks of a run share the work, from what the store holds of its newest attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import STEP_CHECKPOINT, STEP_EVALUATION, STEP_FIRST
from rankscope_server.answers import LeftOut, capped, json_object
from rankscope_server.api.groups.mesh import Family, Layout, families_of, layout_of
from rankscope_server.api.groups.stored import groups_of
from rankscope_server.api.parallelism import words
from rankscope_server.api.parallelism.pipeline import pipeline_over
from rankscope_server.api.parallelism.schema import (
    BearingFinding,
    GroupFamily,
    Mesh,
    MeshAxis,
    MeshValue,
    Parallelism,
    Pipeline,
)
from rankscope_server.api.parallelism.staleness import staleness
from rankscope_server.api.parallelism.values import memory_value, number_values, step_values
from rankscope_server.api.runs.queries import RANK_HEAD, onset_step, rank_rows, role_of
from rankscope_server.api.steps.map import load_peers, own_part
from rankscope_server.api.steps.queries import (
    RECENT_STEPS,
    Array,
    load_range,
    steps_of_many,
    typical_range,
    waiting_planes,
)
from rankscope_server.store import tables
from rankscope_server.verdict.reference import reference_kinds

MAX_RANKS = 16_384  # in the mesh
MAX_FAMILIES = 40
MAX_DESCRIPTIONS = 4
KINDS = frozenset(("stage_imbalance", "pipeline_bubble", "no_pipelining", "staleness", "hot_shard"))
_COLUMNS = (*RANK_HEAD, "num_stages", "num_microbatches", "schedule", "state")
_METRICS = ("step", "blocked", "forward", "forward_blocked", "backward", "backward_blocked",
            "microbatches", "num_collectives", "flags")  # fmt: skip
_SPECIAL = STEP_FIRST | STEP_CHECKPOINT | STEP_EVALUATION


def parallelism(connection: sa.Connection, run: sa.Row[Any]) -> Parallelism:
    """Return mesh, groups, pipeline and staleness of the newest attempt."""
    rows = {row.rank: row for row in rank_rows(connection, run.run_id, run.attempt, _COLUMNS)}
    world_size = max([run.world_size, *(rank + 1 for rank in rows)])
    stage_of = {rank: row.stage for rank, row in rows.items() if row.num_stages > 1}
    families = families_of(groups_of(connection, run), world_size, stage_of)
    layout = layout_of(families, range(world_size), stage_of)
    first, last = _steps(connection, run, world_size)
    planes = _planes(connection, run, first, last, world_size)
    said = max(
        ((row.num_stages, row.num_microbatches, row.schedule) for row in rows.values()),
        default=(0, 0, ""),
    )
    found = pipeline_over(planes, stage_of, said, (first, last))
    calls = _calls(connection, run)
    shown = [_family(family, calls, world_size) for family in families[:MAX_FAMILIES]]
    return Parallelism(
        text=words.first_sentence(found, layout, families, world_size),
        attempt=run.attempt,
        world_size=world_size,
        step_lo=first,
        step_hi=last,
        mesh=_mesh(connection, run, rows, layout, planes, last),
        families=shown,
        families_capped=capped(len(shown), len(families)),
        pipeline=found,
        no_pipeline="" if found is not None else _why_none(families, stage_of, world_size),
        staleness=staleness(connection, run),
        findings=_bearing(connection, run),
        left_out=_left_out(found, planes),
    )


def _steps(connection: sa.Connection, run: sa.Row[Any], world_size: int) -> tuple[int, int]:
    """Return the newest steps of the attempt that show a typical one; (1, 0) before the first."""
    attempt = tables.attempt.c
    last = connection.scalar(
        sa.select(attempt.step_hi)
        .where(attempt.run_id == run.run_id, attempt.attempt == run.attempt)
    )  # fmt: skip
    if not last:
        return 1, 0
    most = min(RECENT_STEPS, steps_of_many(world_size, ()))
    return typical_range(connection, run.run_id, last, most, onset_step(run))


def _planes(
    connection: sa.Connection, run: sa.Row[Any], first: int, last: int, world_size: int
) -> dict[str, Array]:
    """Return self time and its parts, ranks x ordinary steps, in ms; NaN where not known."""
    planes = load_range(connection, run.run_id, _METRICS, first, last, run.attempt)
    height = len(planes["step"])
    if height < world_size:
        more = ((0, world_size - height), (0, 0))
        planes = {
            name: np.pad(plane, more, constant_values=np.nan) for name, plane in planes.items()
        }
    planes = waiting_planes(planes)
    flags = np.nan_to_num(planes["flags"]).astype(np.int64)
    usual = ~np.any(flags & _SPECIAL, axis=0)
    parts = {name: own_part(name, planes) for name in ("forward", "backward")}
    whole = {
        "own": planes["step"] - planes["blocked"],
        "duration": planes["step"],
        "blocked": planes["blocked"],
        "microbatches": planes["microbatches"],
    }
    parts |= whole
    if not usual.any():  # one step of which nothing is known
        return {name: np.full((world_size, 1), np.nan) for name in parts}
    return {name: plane[:world_size, usual].astype(float) for name, plane in parts.items()}


def _mesh(
    connection: sa.Connection, run: sa.Row[Any], rows: Mapping[int, Any], layout: Layout,
    planes: Mapping[str, Array], last: int,
) -> Mesh:  # fmt: skip
    ranks = range(min(len(planes["own"]), MAX_RANKS))
    hosts = sorted({row.host for row in rows.values() if row.host})
    place_of = {host: place for place, host in enumerate(hosts)}
    return Mesh(
        text=words.mesh_text(layout, len(layout.at)),
        axes=[MeshAxis(name=axis.name, size=axis.size, family=axis.family)
              for axis in layout.axes],
        rank=list(ranks),
        host=[place_of.get(rows[rank].host, -1) if rank in rows else -1 for rank in ranks],
        stage=[rows[rank].stage if rank in rows and rows[rank].stage >= 0 else None
               for rank in ranks],
        at=[list(layout.at[rank]) for rank in ranks],
        hosts=hosts,
        values=_values(connection, run, rows, planes, ranks, last),
        ranks_capped=capped(len(ranks), len(layout.at)),
    )  # fmt: skip


def _values(
    connection: sa.Connection,
    run: sa.Row[Any],
    rows: Mapping[int, Any],
    planes: Mapping[str, Array],
    ranks: range,
    last: int,
) -> list[MeshValue]:
    roles = [role_of(rows[rank]) if rank in rows else -1 for rank in ranks]
    has_own = "own" in reference_kinds(roles)  # whose reference are their own early steps
    early = load_peers(connection, run, "own_work").early if has_own else None
    cut = {name: plane[: len(ranks)] for name, plane in planes.items()}
    states = {rank: row.state for rank, row in rows.items()}
    found = step_values(cut, roles, None if early is None else early[: len(ranks)])
    found += [memory_value(states, ranks), *number_values(connection, run, last, ranks)]
    return [one for one in found if one.num_known or one.key == "own_ratio"]


def _calls(connection: sa.Connection, run: sa.Row[Any]) -> dict[str, tuple[int, int]]:
    """Return of each group how many calls of ranks there were, and for how many ns they blocked."""
    table = tables.op_rollup.c
    rows = connection.execute(
        sa.select(table.group, sa.func.sum(table.count), sa.func.sum(table.blocked_ns))
        .where(table.run_id == run.run_id, table.attempt == run.attempt)
        .group_by(table.group)
    )
    return {group: (int(calls), int(blocked)) for group, calls, blocked in rows}


def _family(family: Family, calls: Mapping[str, tuple[int, int]], world_size: int) -> GroupFamily:
    groups = [*family.groups, *family.also]
    mine = [calls[group.name] for group in groups if group.name in calls]
    total = sum(blocked for _, blocked in calls.values())
    named = Counter(group.description for group in groups if group.description)
    return GroupFamily(
        name=family.name,
        text=family.text(world_size),
        num_groups=len(family.groups),
        size=family.size,
        backend=", ".join(sorted({group.backend for group in groups if group.backend})),
        descriptions=[text for text, _ in named.most_common(MAX_DESCRIPTIONS)],
        is_axis=family.is_axis,
        num_calls=sum(count for count, _ in mine),
        blocked_ratio=sum(blocked for _, blocked in mine) / total if total else None,
    )


def _why_none(families: Sequence[Family], stage_of: Mapping[int, int], world_size: int) -> str:
    """Return why no pipeline is shown."""
    if world_size == 1:
        return "one rank has no pipeline"
    if any(family.name == "pipeline" for family in families):
        return (
            "groups are called pipeline, and no rank said which stage it holds: stages of "
            "torch.distributed.pipelining are known"
        )
    return "no rank holds a stage of a pipeline" if not stage_of else "only one stage reports"


def _bearing(connection: sa.Connection, run: sa.Row[Any]) -> list[BearingFinding]:
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.id, table.body)
        .where(table.run_id == run.run_id, table.attempt == run.attempt)
        .where(table.state != "recovered")
        .order_by(table.id)
    )
    bodies = [(row.id, json_object(row.body)) for row in rows]
    return [
        BearingFinding(id=number, what=body["what"], severity=body["severity"])
        for number, body in bodies if body.get("kind") in KINDS
    ]  # fmt: skip


def _left_out(found: Pipeline | None, planes: Mapping[str, Array]) -> list[LeftOut]:
    if found is None or found.idle_ratio is not None:
        return []
    unknown = int(np.isnan(planes["own"]).sum())
    what = "self times of a rank in a step, without which a stage is not known"
    return [LeftOut(what=what, count=unknown)] if unknown else []
