"""The map, ranks by steps: one byte a cell, and in a bin the worst cell, never a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.backends import is_of_device
from rankscope.wire.schema import STEP_CHECKPOINT, STEP_EVALUATION, STEP_FIRST, STEP_SKIPPED
from rankscope_server.answers import capped, json_object
from rankscope_server.api.runs.queries import RANK_HEAD, onset_step, rank_rows, role_of
from rankscope_server.api.steps.bands import groups_by_order, map_bands, memberships
from rankscope_server.api.steps.cells import (
    Array,
    Held,
    Plane,
    Reference,
    StepSample,
    deviations,
    encode,
    fold_block,
    fold_ranks,
    fold_times,
    missing_share,
    robust_z,
    scale_of,
    to_base64,
    usual_ratios,
    widths,
)
from rankscope_server.api.steps.lanes import Lanes, Ranks, choose_lanes, rows_of
from rankscope_server.api.steps.map_words import MS_METRICS, RATIO_METRICS, map_text, reference_text
from rankscope_server.api.steps.queries import (
    WARM_UP_STEPS,
    bin_of,
    first_step,
    known,
    load_range,
    quiet,
    warm_up_steps,
)
from rankscope_server.api.steps.schema import Cell, Map, Mark, PinnedRow, Usual
from rankscope_server.findings.text import percent_text
from rankscope_server.ingest.step_metrics import (
    BLOCKED_METRICS,
    DEVICE_METRICS,
    FLOAT_METRICS,
    PHASE_METRICS,
    STARTED,
)
from rankscope_server.problems import Problem, not_found
from rankscope_server.store import tables
from rankscope_server.store.tiles import read_blocks
from rankscope_server.verdict.reference import Ratios, ratios, reference_kinds

MAP_METRICS = (*RATIO_METRICS, *MS_METRICS)
EARLY_STEPS = 50
HOLD_STEPS = 64  # so long a sample is repeated
MAX_CELLS = 4_000_000  # some 80 MB while they are folded
CELLS_AT_ONCE = 500_000  # that are compared: some 30 MB
MAX_PINNED = 5
MAX_MARKS = 500
MIN_LOST_RATIO = 0.02  # a lane that lost less than this is not worth a pin
_FLAGS = {
    STEP_SKIPPED: "skipped",
    STEP_CHECKPOINT: "checkpoint",
    STEP_EVALUATION: "evaluation",
    STEP_FIRST: "first",
}


@dataclass(frozen=True, slots=True)
class Peers:
    """What cells are compared with."""

    roles: list[int]  # per rank, see `role_of`
    hosts: list[str]
    early: Array | None  # the metric over early steps, ranks by steps; None: it serves for nothing
    on_device: Array  # per rank: what only its device knows is sampled

    @property
    def height(self) -> int:
        """Return how many ranks there are."""
        return len(self.roles)


def rank_map(
    connection: sa.Connection,
    run: sa.Row[Any],
    metric: str,
    lo: int | None,
    hi: int | None,
    width: int,
    lanes: int,
    order: str = "rank",
) -> Map:
    """Return the map of a metric over steps `lo`..`hi`. Raises Problem 422."""
    check_metric(metric)
    first, last = step_range(run, lo, hi)
    peers = load_peers(connection, run, metric)
    width = min(width, max(1, MAX_CELLS // max(peers.height, 1)))
    size = bin_of(last - first + 1, width)
    held = Held(peers.on_device & (metric in DEVICE_METRICS), HOLD_STEPS)
    sample = StepSample(peers.height, first, last)
    plane = _fold_steps(connection, run.run_id, metric, peers, first, last, size, held, sample)
    is_ratio = metric in RATIO_METRICS
    warm_up = _warm_up(connection, run, first, size)
    ways = memberships(connection, run, peers.hosts, peers.roles)
    lost = deviations(plane, warm_up[0], is_ratio=is_ratio)
    ranks = Ranks(peers.hosts, peers.roles, lost, groups_by_order(ways))
    chosen = choose_lanes(order, ranks, lanes)
    worst, missing = fold_ranks(plane, chosen, size, last - first + 1)
    by_rank = chosen if order == "rank" else choose_lanes("rank", ranks, lanes)  # for colours
    plain = worst if order == "rank" else fold_ranks(plane, by_rank, size, last - first + 1)[0]
    scale = None if is_ratio else scale_of(plain)
    reference = _reference(plane.kinds) if is_ratio else None
    usual = usual_ratios(plain, is_of_peers=reference == "peers") if is_ratio else None
    noise = sample.usual(is_of_peers=reference == "peers")
    marks, num_marks = _marks(connection, run, first, last)
    pinned = _pinned(connection, run, plane, ranks, size, last - first + 1, scale, chosen, noise)
    return Map(
        metric=metric,
        order=order,
        unit="ratio" if is_ratio else "ms",
        reference=reference,
        reference_text=reference_text(metric, plane.kinds),
        value_lo=None if scale is None else 0.0,
        value_hi=scale,
        usual=usual,
        noise=noise,
        step_lo=first,
        step_hi=last,
        bin=size,
        columns=plane.worst.shape[1],
        rank_bin=chosen.most_ranks,
        rows=rows_of(chosen, ranks),
        cells=encode(worst, scale),
        missing=to_base64(missing),
        pinned=pinned,
        bands=map_bands(ways, chosen, [pin.rank for pin in pinned]),
        marks=marks,
        marks_capped=capped(len(marks), num_marks),
        time_ms=[time / 1e6 if time else None for time in plane.times.tolist()],
        world_size=peers.height,
        text=map_text(metric, plane, peers.on_device, missing, held, warm_up, usual),
    )


def cell(connection: sa.Connection, run: sa.Row[Any], rank: int, step: int) -> Cell:
    """Return the exact numbers of one rank in one step. Raises Problem 404."""
    peers = load_peers(connection, run, "own_work")
    if not 0 <= rank < peers.height:
        raise not_found(f"no rank {rank} in this run", f"ranks are 0 to {peers.height - 1}", "rank")
    planes = load_range(connection, run.run_id, (*FLOAT_METRICS, STARTED), step, step)
    if len(planes["step"]) <= rank:
        planes = {name: np.full((peers.height, 1), np.nan) for name in (*FLOAT_METRICS, STARTED)}
    column = {name: plane[rank, 0] for name, plane in planes.items()}
    compared = _compare(peers, fit(planes["own_work"], peers.height))
    phases = {
        name: known(column[name] - _zero(column.get(f"{name}_blocked"))) for name in PHASE_METRICS
    }
    started = column[STARTED]
    flags = 0 if np.isnan(column["flags"]) else int(column["flags"])
    return Cell(
        rank=rank,
        step=step,
        host=peers.hosts[rank],
        ratio=known(compared.ratio[rank, 0]),
        reference_ms=known(compared.reference[rank, 0]),
        own_work_ms=known(column["own_work"]),
        step_ms=known(column["step"]),
        phases=phases,
        blocked_ms=known(column["blocked"]),
        cpu_ms=known(column["cpu"]),
        time_ms=None if np.isnan(started) or not started else float(started) / 1e6,
        flags=[name for bit, name in _FLAGS.items() if flags & bit],
    )


def worst_cell(
    connection: sa.Connection, run: sa.Row[Any], metric: str, ranks: list[tuple[int, int]],
    lo: int, hi: int,
) -> Cell:  # fmt: skip
    """Return the cell of these ranks (first and last of each range) that the map colours by.

    Raises Problem 404 where none of them has data, 422 for a metric or a range that it has not.
    """
    check_metric(metric)
    first, last = step_range(run, lo, hi)
    peers = load_peers(connection, run, metric)
    if (last - first + 1) * peers.height > MAX_CELLS:
        most = MAX_CELLS // peers.height
        raise Problem(422, f"more than {most:,} steps of {peers.height:,} ranks", "to",
                      "ask for the steps of one bin of the map")  # fmt: skip
    values = own_part(metric, load_range(connection, run.run_id, planes_of(metric), first, last))
    values = fit(values, peers.height)
    if metric in RATIO_METRICS:
        values = _compare(peers, values).ratio
    is_asked = np.zeros(peers.height, bool)
    for low, high in ranks:
        is_asked[low : high + 1] = True
    values = np.where(is_asked[:, None], values, np.nan)
    if np.isnan(values).all():
        raise not_found("these ranks have no data in these steps", "ask for others", "ranks")
    rank, column = np.unravel_index(int(np.nanargmax(values)), values.shape)
    return cell(connection, run, int(rank), first + int(column))


def check_metric(metric: str) -> None:
    """Raise Problem 422 for a metric that the map does not have."""
    if metric not in MAP_METRICS:
        raise Problem(
            422, f"metric {metric[:40]!r} is not known", "metric", f"use {', '.join(MAP_METRICS)}"
        )


def step_range(run: sa.Row[Any], lo: int | None, hi: int | None) -> tuple[int, int]:
    """Return the steps asked for, within those that exist. Raises Problem 422."""
    first = 1 if lo is None else max(lo, 1)
    last = run.step if hi is None else min(hi, run.step)
    if lo is not None and hi is not None and lo > hi:
        raise Problem(422, f"from {lo} is after to {hi}", "from", "exchange them")
    return first, max(last, first - 1)


def load_peers(connection: sa.Connection, run: sa.Row[Any], metric: str) -> Peers:
    """Return roles and hosts of all ranks, and the early steps that serve as own reference."""
    rows = {row.rank: row for row in rank_rows(connection, run.run_id, run.attempt, RANK_HEAD)}
    return peers_of(connection, run, metric, rows)


def peers_of(
    connection: sa.Connection, run: sa.Row[Any], metric: str, rows: Mapping[int, Any]
) -> Peers:
    """Return the same where the rows of the ranks are known."""
    height = max([run.world_size, *(rank + 1 for rank in rows)])
    roles = [role_of(rows[rank]) if rank in rows else -1 for rank in range(height)]
    needs_early = metric in RATIO_METRICS and "own" in reference_kinds(roles)
    return Peers(
        roles=roles,
        hosts=[rows[rank].host if rank in rows else "" for rank in range(height)],
        early=fit(_early(connection, run, metric), height) if needs_early else None,
        on_device=np.array(
            [rank in rows and is_of_device(rows[rank].backend) for rank in range(height)], bool
        ),
    )


def _early(connection: sa.Connection, run: sa.Row[Any], metric: str) -> Array:
    attempts = tables.attempt.c
    begin = connection.scalar(
        sa.select(sa.func.min(attempts.step_lo)).where(attempts.run_id == run.run_id)
    )
    lo = int(begin or 1)  # `ratios` leaves the warm-up out by itself
    hi = lo + EARLY_STEPS
    onset = onset_step(run)
    if onset is not None and onset - lo >= 2 * WARM_UP_STEPS:
        hi = min(hi, onset - 1)
    return own_part(metric, load_range(connection, run.run_id, planes_of(metric), lo, hi))


def planes_of(metric: str) -> tuple[str, ...]:
    """Return what has to be read for a metric."""
    blocked = f"{metric}_blocked"
    return (metric, blocked) if blocked in BLOCKED_METRICS else (metric,)


def own_part(metric: str, planes: dict[str, Array]) -> Array:
    """Return what a rank works itself: waiting for peers inside a phase is not its own."""
    blocked = planes.get(f"{metric}_blocked")
    return planes[metric] if blocked is None else planes[metric] - np.nan_to_num(blocked)


def _compare(peers: Peers, values: Array) -> Ratios:
    return ratios(values, peers.roles, peers.early)


def _fold_steps(
    connection: sa.Connection,
    run_id: str,
    metric: str,
    peers: Peers,
    first: int,
    last: int,
    size: int,
    held: Held,
    sample: StepSample,
) -> Plane:
    columns = max(-(-(last - first + 1) // size), 0)
    shape = (peers.height, columns)
    plane = Plane(
        np.full(shape, np.nan, np.float32), np.zeros(shape, np.int32), np.zeros(columns, np.int64),
        set(),
    )  # fmt: skip
    metrics = (*planes_of(metric), STARTED)
    begin_at = max(first - HOLD_STEPS, 1) if held.num_rows else first  # a sample from before holds
    for start, planes in read_blocks(connection, run_id, metrics, begin_at, last):
        early = max(first - start, 0)
        values = held.fill(fit(own_part(metric, planes), peers.height), early)[:, early:]
        places = (np.arange(values.shape[1]) + start + early - first) // size
        at_once = max(1, CELLS_AT_ONCE // max(peers.height, 1))
        for begin in range(0, len(places), at_once):
            part = values[:, begin : begin + at_once]
            if metric in RATIO_METRICS:
                compared = _compare(peers, part)
                part = compared.ratio
                sample.add(part, start + early + begin)
                plane.kinds.update(compared.kinds)
            fold_block(plane, part, places[begin : begin + at_once])
        fold_times(plane, planes[STARTED][:, early:], places)
    return plane


def fit(values: Array, height: int) -> Array:
    """Return values, ranks by steps, as so many ranks; of those without data NaN."""
    if len(values) >= height:
        return values[:height]
    return np.concatenate([values, np.full((height - len(values), values.shape[1]), np.nan)])


def _zero(value: Any) -> Any:
    return 0.0 if value is None or np.isnan(value) else value


def _pinned(
    connection: sa.Connection,
    run: sa.Row[Any],
    plane: Plane,
    ranks: Ranks,
    size: int,
    num_steps: int,
    scale: float | None,
    lanes: Lanes,
    noise: Usual | None,
) -> list[PinnedRow]:
    why = {
        rank: text for rank, text in _accused(connection, run).items() if rank < len(ranks.hosts)
    }
    if scale is None and plane.worst.size and lanes.most_ranks > 1:
        lost = np.nan_to_num(quiet(np.nanmean, np.maximum(plane.worst - 1, 0), axis=1))
        for rank in np.argsort(-lost).tolist():
            if lost[rank] >= MIN_LOST_RATIO:
                why.setdefault(
                    rank, f"works {percent_text(float(lost[rank]))} longer than its reference"
                )
    rows = []
    for rank in list(why)[:MAX_PINNED]:
        worst = plane.worst[rank : rank + 1]
        present = plane.present[rank : rank + 1]
        missing = missing_share(present, widths(plane, size, num_steps)[None, :])
        largest = known(quiet(np.nanmax, worst)) if scale is None else None
        rows.append(
            PinnedRow(
                rank=rank, label=f"Rank {rank}", host=ranks.hosts[rank], why=why[rank],
                max_ratio=largest, max_z=None if largest is None else robust_z(largest, noise),
                cells=encode(worst, scale), missing=to_base64(missing),
            )
        )  # fmt: skip
    return rows


def _accused(connection: sa.Connection, run: sa.Row[Any]) -> dict[int, str]:
    """Return the ranks that findings name, those of the verdict first, then by cost."""
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.body, table.key)
        .where(table.run_id == run.run_id, table.state != "recovered")
        .order_by(table.id)
    )
    key = (json_object(run.verdict) or {}).get("key")
    findings = [(row.key != key, json_object(row.body)) for row in rows]
    findings.sort(key=lambda one: (one[0], -(one[1].get("cost_throughput_ratio") or 0.0)))
    found: dict[int, str] = {}
    for _, finding in findings:
        for rank in finding.get("ranks", []):
            found.setdefault(rank, str(finding.get("what", "")))
    return found


def _marks(
    connection: sa.Connection, run: sa.Row[Any], first: int, last: int
) -> tuple[list[Mark], int]:
    """Return the marks of a range, of checkpoints the newest, and how many there are."""
    marks = []
    onset = onset_step(run)
    if onset is not None:
        marks.append(Mark(step=onset, kind="onset", text=str(json_object(run.verdict)["what"])))
    attempts = tables.attempt.c
    rows = connection.execute(
        sa.select(attempts.attempt, attempts.step_lo)
        .where(attempts.run_id == run.run_id, attempts.step_lo.is_not(None))
        .order_by(attempts.attempt)
    )
    for number, step in rows:
        if number == 0:
            marks.append(Mark(step=step, kind="first", text="first step"))
        else:
            marks.append(Mark(step=step, kind="attempt", text=f"attempt {number} begins"))
    events = tables.event.c
    steps = connection.scalars(
        sa.select(events.step)
        .where(events.run_id == run.run_id, events.name.startswith("checkpoint"), events.step > 0)
        .where(events.step.between(first, last))
        .distinct()
        .order_by(events.step)
    ).all()
    marks += [
        Mark(step=step, kind="checkpoint", text=f"checkpoint at {step}")
        for step in steps[-MAX_MARKS:]
    ]
    inside = [mark for mark in marks if first <= mark.step <= last]
    return inside, len(inside) + max(len(steps) - MAX_MARKS, 0)


def _reference(kinds: set[Reference]) -> Reference | None:
    if not kinds:
        return None
    return "peers" if "peers" in kinds else "own"


def _warm_up(connection: sa.Connection, run: sa.Row[Any], first: int, size: int) -> tuple[int, int]:
    """Return in how many of the first columns there is warm-up, and which step is its last."""
    begin = first_step(connection, run.run_id)
    last = begin + warm_up_steps(run.step - begin + 1) - 1
    return max(-(-(last - first + 1) // size), 0), last
