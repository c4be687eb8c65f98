"""Numbers of every rank that the cells of the mesh can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope_server.api.parallelism.schema import MeshValue, Unit
from rankscope_server.api.resources.quantities import QUANTITIES
from rankscope_server.findings.statistics import Array, median
from rankscope_server.store import tables
from rankscope_server.verdict.budget import shared_block
from rankscope_server.verdict.reference import ratios

NUMBER_STEPS = 5  # the newest, over which numbers of training are averaged
_NUMBERS = ("cuda_allocated", "loss", "gradient_norm", "gradient_norm_local", "tokens_per_second",
            "mfu_ratio")  # fmt: skip
_MOVES = frozenset(("loss", "gradient_norm", "gradient_norm_local"))  # zero means nothing for them
_QUANTITY = {one.key: one for one in QUANTITIES}


class _Memory(msgspec.Struct):
    """What the mesh shows of where a rank is."""

    rss_bytes: int = 0


_memory_of = msgspec.json.Decoder(_Memory).decode


def step_values(
    planes: Mapping[str, Array], roles: Sequence[int], early: Array | None
) -> list[MeshValue]:
    """Return what steps say of ranks; `planes` are "own", "duration", "blocked", in ms."""
    own, step, blocked = planes["own"], planes["duration"], planes["blocked"]
    shared = shared_block(blocked, roles)
    compared = ratios(own, roles, early)
    is_of_peers = compared.kind == "peers"
    beside = "peers" if is_of_peers else "its early steps"
    reference = "the others of its stage" if is_of_peers else "the rank's own early steps"
    ratio = _value(
        "own_ratio", f"Self time against {beside}", "times",
        f"median of the steps, over {reference}", median(compared.ratio, 1),
    )  # fmt: skip
    own_ms = _value("own_ms", "Self time", "ms", "median of the steps", median(own, 1))
    return [
        # of ranks without peers the first says how they differ, which the ratio does not
        *((ratio, own_ms) if is_of_peers else (own_ms, ratio)),
        _value("step_ms", "Step time", "ms", "median of the steps", median(step, 1)),
        _value("blocked_ratio", "Blocked on peers", "ratio", "of the steps' time",
               _share(blocked, step)),
        _value("waiting_ratio", "Waiting for others", "ratio",
               "of the steps' time: blocked for longer than the rank that came last",
               _share(np.maximum(blocked - shared, 0.0), step)),
        _value("communication_ratio", "Exposed communication", "ratio",
               "of the steps' time: blocked for as long as the rank that came last",
               _share(shared, step)),
    ]  # fmt: skip


def memory_value(states: Mapping[int, str | None], ranks: Sequence[int]) -> MeshValue:
    """Return the resident memory that ranks said last."""
    found = [_memory_of(text).rss_bytes if (text := states.get(rank)) else 0 for rank in ranks]
    one = _QUANTITY["rank_memory"]
    values = np.array(found, float)
    return _value(one.key, one.title, "bytes", one.source, np.where(values > 0, values, np.nan))


def number_values(
    connection: sa.Connection, run: sa.Row[Any], last: int, ranks: Sequence[int]
) -> list[MeshValue]:
    """Return numbers of training of the newest steps up to `last`; NaN in one: unknown."""
    metric = tables.metric.c
    every = {_QUANTITY[key].columns[0]: _QUANTITY[key] for key in _NUMBERS}
    names = {name: one for name, one in every.items() if _has(connection, run.run_id, name)}
    rows = connection.execute(
        sa.select(
            metric.name, metric.rank, sa.func.avg(metric.value),
            sa.func.count() - sa.func.count(metric.value),
        )
        .where(
            metric.run_id == run.run_id, metric.attempt == run.attempt,
            # the key of the numbers is by name, rank and step
            metric.name.in_(list(names)), metric.rank.in_(list(ranks)),
            metric.step.between(last - NUMBER_STEPS + 1, last),
        )
        .group_by(metric.name, metric.rank)
    )  # fmt: skip
    row_of = {rank: row for row, rank in enumerate(ranks)}
    found = {name: np.full(len(ranks), np.nan) for name in names}
    for name, number, mean, num_unknown in rows:
        if number in row_of and not num_unknown:
            found[name][row_of[number]] = mean
    return [
        _value(one.key, one.title, _unit(one.unit), f"mean of {NUMBER_STEPS} steps; {one.source}",
               found[name], from_zero=one.key not in _MOVES)
        for name, one in names.items() if not np.isnan(found[name]).all()
    ]  # fmt: skip


def _has(connection: sa.Connection, run_id: str, name: str) -> bool:
    """Return whether anything was sent of a number."""
    table = tables.metric.c
    found = sa.select(table.rank).where(table.run_id == run_id, table.name == name).limit(1)
    return connection.scalar(found) is not None


def _unit(unit: str) -> Unit:
    known: dict[str, Unit] = {"bytes": "bytes", "ratio": "ratio", "tokens/s": "tokens/s"}
    return known.get(unit, "")


def _share(part: Array, step: Array) -> Array:
    """Return for each rank which share of its steps a part is, where both are known."""
    is_known = ~np.isnan(part) & ~np.isnan(step)
    total = np.where(is_known, step, 0.0).sum(axis=1)
    share: Array = np.where(is_known, part, 0.0).sum(axis=1) / np.where(total > 0, total, np.nan)
    return share


def _value(
    key: str, title: str, unit: Unit, what: str, values: Array, *, from_zero: bool = True
) -> MeshValue:
    known = values[~np.isnan(values)]
    low = 0.0 if from_zero else float(known.min()) if len(known) else None
    return MeshValue(
        key=key,
        title=title,
        unit=unit,
        what=what,
        values=[None if value != value else float(f"{value:.4g}") for value in values.tolist()],
        lo=None if unit == "times" else low,
        hi=None if unit == "times" or not len(known) else float(known.max()),
        num_known=len(known),
    )
