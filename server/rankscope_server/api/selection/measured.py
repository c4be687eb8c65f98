"""How self time of some ranks in some steps differs from that of the other ranks.

Every selected rank is read, of many others and of many steps only some, spread evenly, so that
an answer takes as long for 10,000 steps as for some hundreds. How many were read it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.selection.common import Array
from rankscope_server.api.selection.schema import PhaseDeviation, Reference
from rankscope_server.api.steps.cells import usual_ratios
from rankscope_server.api.steps.map import Peers, own_part, planes_of
from rankscope_server.api.steps.queries import missing_plane
from rankscope_server.api.steps.schema import Usual
from rankscope_server.findings.statistics import median, middle
from rankscope_server.ingest.step_metrics import BLOCK_STEPS, PHASE_METRICS, STARTED
from rankscope_server.store.tiles import BLOCK_RANKS, read_blocks
from rankscope_server.verdict.reference import Ratios, ratios

MAX_OTHER_BLOCKS = 16  # of ranks that are not selected
MAX_CELLS = 400_000  # of self time
MAX_PHASE_CELLS = 100_000  # of each phase
NOISE_STEPS = 128  # are enough to say how noisy the run is
LEAST_BLOCKS = 2  # of steps, where there are so many: the first and the last
LEAST_STEPS = 64  # that are looked at to say how noisy the run is, and how it was before
_IN_BLOCK = BLOCK_STEPS - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """What is read: ranks, and blocks of steps in ranges."""

    rank_blocks: list[int]
    ranks: Array  # all of those blocks
    spans: list[tuple[int, int]]  # first and last step of each block


@dataclass(frozen=True, slots=True)
class Measured:
    """Self time of ranks by steps, in ms, and its ratio to the reference of each cell."""

    ranks: Array
    steps: Array
    is_chosen: Array  # per rank that was read
    is_inside: Array  # per step that was read
    values: Array
    ratio: Array  # of the chosen ranks, in all steps
    reference_ms: Array
    reference: Reference | None
    usual: Usual | None

    def rank_ratios(self) -> Array:
        """Return the median ratio of each chosen rank over the selected steps."""
        return np.asarray(median(self.ratio[:, self.is_inside]))

    def before_ratio(self, first: int) -> float | None:
        """Return self time over that of the same ranks in the steps read before.

        `first` is the first step after the warm-up. None where too few steps are known.
        """
        mine = self.values[self.is_chosen]
        begin = self.steps[self.is_inside][0]
        earlier = (self.steps < begin) & (self.steps >= first)
        if earlier.sum() < LEAST_STEPS // 4:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            change = middle(median(mine[:, self.is_inside]) / median(mine[:, earlier]))
        return None if np.isnan(change) else change


def sample_of(chosen: Array, roles: Array, lo: int, hi: int, *, is_whole: bool) -> Sample:
    """Return what to read of `chosen` ranks, others of their roles, and steps `lo`..`hi`.

    All chosen ranks where it is whole, else some of them and of fewer steps.
    """
    others = ~chosen & np.isin(roles, roles[chosen])
    if not others.any():
        others = ~chosen
    mine = _blocks(chosen) if is_whole else _evenly(_blocks(chosen), MAX_OTHER_BLOCKS)
    blocks = np.union1d(mine, _evenly(_blocks(others), MAX_OTHER_BLOCKS))
    ranks = _ranks_of(blocks, len(chosen))
    step_blocks = np.arange(lo // BLOCK_STEPS, hi // BLOCK_STEPS + 1)
    at_once = len(ranks) * BLOCK_STEPS
    most = max(LEAST_BLOCKS, MAX_CELLS // at_once) if is_whole else MAX_PHASE_CELLS // at_once
    spans = [
        (max(lo, block * BLOCK_STEPS), min(hi, block * BLOCK_STEPS + BLOCK_STEPS - 1))
        for block in _evenly(step_blocks, max(1, most)).tolist()
    ]
    return Sample(blocks.tolist(), ranks, spans)


def measure(
    connection: sa.Connection, run: sa.Row[Any], peers: Peers, chosen: Array, lo: int, hi: int
) -> Measured:
    """Return self time in steps `lo`..`hi`, and in some around them."""
    roles = np.array(peers.roles)
    sample = sample_of(chosen, roles, lo, hi, is_whole=True)
    lead = min(max(hi - lo + 1, LEAST_STEPS), 2 * LEAST_STEPS)
    spans = [(max(1, lo - lead), lo - 1), *sample.spans]
    missing = LEAST_STEPS - (hi - lo + 1) - (lo - spans[0][0])
    if missing > 0:
        spans.append((hi + 1, min(run.step, hi + missing)))
    values = _read(connection, run, ("own_work",), sample, spans)["own_work"].astype(float)
    steps = np.concatenate([np.arange(first, last + 1) for first, last in spans])
    rows = sample.ranks
    is_chosen, own_roles = chosen[rows], roles[rows]
    early = None if peers.early is None else peers.early[rows]

    def compared(cells: Array) -> Ratios:
        return ratios(cells, own_roles.tolist(), early)

    some = compared(values[:, _evenly(np.arange(len(steps)), NOISE_STEPS)])
    is_of_peers = "peers" in some.kinds
    usual = usual_ratios(some.ratio, is_of_peers=is_of_peers)
    reference_ms = _others(values, own_roles, is_chosen)
    kind: Reference | None = "others"
    if np.isnan(reference_ms).all() and not chosen.all():
        reference_ms, kind = _others(values, np.zeros_like(own_roles), is_chosen), "other roles"
    if np.isnan(reference_ms).all():
        reference_ms = compared(values).reference[is_chosen]
        kind = "peers" if is_of_peers else "own"
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(reference_ms > 0, values[is_chosen] / reference_ms, np.nan)
    is_inside = (steps >= lo) & (steps <= hi)
    return Measured(
        rows, steps, is_chosen, is_inside, values, ratio, reference_ms,
        None if np.isnan(ratio[:, is_inside]).all() else kind, usual,
    )  # fmt: skip


def phase_deviations(
    connection: sa.Connection, run: sa.Row[Any], peers: Peers, chosen: Array, lo: int, hi: int
) -> list[PhaseDeviation]:
    """Return each phase beside that of the others, the largest excess first.

    Medians over ranks and steps of what a rank does itself. Empty without others to compare with.
    """
    if chosen.all():
        return []
    roles = np.array(peers.roles)
    sample = sample_of(chosen, roles, lo, hi, is_whole=False)
    metrics = sorted({name for phase in PHASE_METRICS for name in planes_of(phase)})
    planes = _read(connection, run, tuple(metrics), sample, sample.spans)
    is_chosen, roles = chosen[sample.ranks], roles[sample.ranks]
    if not np.isin(roles[~is_chosen], roles[is_chosen]).any():
        roles = np.zeros_like(roles)
    found = []
    for phase in PHASE_METRICS:
        values = own_part(phase, planes).astype(float)
        theirs = _others(values, roles, is_chosen)
        mine = values[is_chosen]
        extra = middle(median(mine - theirs))
        if not np.isnan(extra):
            found.append(
                PhaseDeviation(
                    phase=phase, self_ms=middle(median(mine)), others_ms=middle(median(theirs)),
                    extra_ms=extra,
                )
            )  # fmt: skip
    return sorted(found, key=lambda one: -abs(one.extra_ms))


def times_of(
    connection: sa.Connection, run: sa.Row[Any], chosen: Array, lo: int, hi: int
) -> tuple[int, int] | None:
    """Return when the first of these steps began and the last ended, in ns of their hosts' clocks.

    Taken from the first and the last block of steps that hold one; None where none is known.
    """
    blocks = _evenly(_blocks(chosen), MAX_OTHER_BLOCKS)
    ranks = _ranks_of(blocks, len(chosen))
    ends = {(lo, min(hi, lo | _IN_BLOCK)), (max(lo, hi & ~_IN_BLOCK), hi)}
    sample = Sample(blocks.tolist(), ranks, sorted(ends))
    planes = _read(connection, run, (STARTED, "step"), sample, sample.spans)
    started = planes[STARTED][chosen[ranks]]
    length = np.nan_to_num(planes["step"][chosen[ranks]].astype(float)) * 1e6
    is_known = started > 0
    if not is_known.any():
        return None
    return int(started[is_known].min()), int((started + length.astype(np.int64)).max())


def _others(values: Array, roles: Array, is_chosen: Array) -> Array:
    """Return for each chosen rank and step the median of the ranks of its role not chosen."""
    found = np.full(values.shape, np.nan)
    for role in np.unique(roles[is_chosen]).tolist():
        others = (roles == role) & ~is_chosen
        if others.any():
            found[roles == role] = median(values[others], axis=0)
    return found[is_chosen]


def _read(
    connection: sa.Connection, run: sa.Row[Any], metrics: tuple[str, ...], sample: Sample,
    spans: Sequence[tuple[int, int]],
) -> dict[str, Array]:  # fmt: skip
    """Return each metric as the ranks of a sample by the steps of all spans."""
    parts: dict[str, list[Array]] = {metric: [] for metric in metrics}
    for lo, hi in spans:
        width = max(hi - lo + 1, 0)
        whole = {metric: missing_plane(metric, len(sample.ranks), width) for metric in metrics}
        if width:
            blocks = read_blocks(
                connection, run.run_id, metrics, lo, hi, rank_blocks=sample.rank_blocks
            )
            for first, planes in blocks:
                for metric, plane in planes.items():
                    known = sample.ranks < len(plane)
                    at = slice(first - lo, first - lo + plane.shape[1])
                    whole[metric][known, at] = plane[sample.ranks[known]]
        for metric, plane in whole.items():
            parts[metric].append(plane)
    return {metric: np.concatenate(planes, axis=1) for metric, planes in parts.items()}


def _blocks(ranks: Array) -> Array:
    """Return the blocks that hold some of the ranks."""
    return np.unique(np.flatnonzero(ranks) // BLOCK_RANKS)


def _ranks_of(blocks: Array, height: int) -> Array:
    ranks = (blocks[:, None] * BLOCK_RANKS + np.arange(BLOCK_RANKS)).ravel()
    return ranks[ranks < height]


def _evenly(values: Array, most: int) -> Array:
    if len(values) <= most:
        return values
    if most == 1:
        return values[-1:]
    return np.asarray(values[np.linspace(0, len(values) - 1, most).round().astype(int)])
