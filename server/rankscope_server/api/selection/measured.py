"""How self time of some ranks in some steps differs from that of the other ranks.

Every selected rank is read, of many others and of many steps only some, spread evenly, so that
an answer takes as long for 10,000 steps as for some hundreds. How many were read it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
from rankscope_server.verdict.reference import ratios

MAX_OTHER_BLOCKS = 16  # of ranks that are not selected
MAX_PHASE_BLOCKS = 8  # of ranks that are selected, and of others
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


@dataclass(frozen=True)
class Measured:
    """Self time of ranks by steps, in ms, and its ratio to the reference of each cell."""

    num_read: int  # ranks
    ranks: Array  # those that are selected
    steps: Array
    inside: slice  # of the steps that were read, those that are selected
    values: Array  # of the selected ranks, in all steps that were read; so are the next two
    ratio: Array
    reference_ms: Array
    reference: Reference | None
    usual: Usual | None

    @cached_property
    def self_ms(self) -> Array:
        """Return the median self time of each selected rank over the selected steps."""
        return median(self.values[:, self.inside])

    def before_ratio(self, first: int) -> float | None:
        """Return self time over that of the same ranks in the steps read before.

        `first` is the first step after the warm-up. None where too few steps are known.
        """
        begin = int(np.searchsorted(self.steps[: self.inside.start], first))
        if self.inside.start - begin < LEAST_STEPS // 4:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            change = middle(self.self_ms / median(self.values[:, begin : self.inside.start]))
        return None if np.isnan(change) else change


def sample_of(chosen: Array, roles: Array, lo: int, hi: int, *, is_whole: bool) -> Sample:
    """Return what to read of `chosen` ranks, others of their roles, and steps `lo`..`hi`.

    All chosen ranks where it is whole, else some of them and of fewer steps.
    """
    others = ~chosen & np.isin(roles, roles[chosen])
    if not others.any():
        others = ~chosen
    most_blocks = MAX_OTHER_BLOCKS if is_whole else MAX_PHASE_BLOCKS
    mine = _blocks(chosen) if is_whole else _evenly(_blocks(chosen), most_blocks)
    blocks = np.union1d(mine, _evenly(_blocks(others), most_blocks))
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
    most = max(LEAST_STEPS, MAX_CELLS // len(sample.ranks))
    lead = min(max(hi - lo + 1, LEAST_STEPS), 2 * LEAST_STEPS, most)
    spans = [(max(1, lo - lead), lo - 1), *sample.spans]
    missing = LEAST_STEPS - (hi - lo + 1) - (lo - spans[0][0])
    if missing > 0:
        spans.append((hi + 1, min(run.step, hi + missing)))
    values = _read(connection, run, ("own_work",), sample, spans)["own_work"].astype(float)
    steps = np.concatenate([np.arange(first, last + 1) for first, last in spans])
    rows = sample.ranks
    is_chosen, own_roles = chosen[rows], roles[rows]
    early = None if peers.early is None else peers.early[rows]
    noise = _evenly(np.arange(len(steps)), NOISE_STEPS)
    compared = None if is_chosen.all() else _against_others(values, own_roles, is_chosen)
    if compared is None:
        every = ratios(values, own_roles.tolist(), early)
        some = every.ratio[:, noise]
        kinds = every.kinds
        kind: Reference = "peers" if "peers" in kinds else "own"
        compared = _Compared(every.ratio[is_chosen], every.reference[is_chosen], kind)
    else:
        of_some = ratios(values[:, noise], own_roles.tolist(), early)
        some, kinds = of_some.ratio, of_some.kinds
    inside = slice(*np.searchsorted(steps, (lo, hi + 1)).tolist())
    is_known = not np.isnan(compared.ratio[:, inside]).all()
    return Measured(
        len(rows), rows[is_chosen], steps, inside, values[is_chosen], compared.ratio,
        compared.reference_ms, compared.kind if is_known else None,
        usual_ratios(some, is_of_peers="peers" in kinds),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Compared:
    """Of each selected rank and step that was read: ratio and reference, and what kind it is."""

    ratio: Array
    reference_ms: Array
    kind: Reference


def _against_others(values: Array, roles: Array, is_chosen: Array) -> _Compared | None:
    """Return the selected ranks beside others of their role, else beside all others."""
    kinds: tuple[tuple[Reference, Array], ...] = (
        ("others", roles), ("other roles", np.zeros_like(roles)),
    )  # fmt: skip
    for kind, own_roles in kinds:
        reference_ms = _others(values, own_roles, is_chosen)
        if not np.isnan(reference_ms).all():
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(reference_ms > 0, values[is_chosen] / reference_ms, np.nan)
            return _Compared(ratio, reference_ms, kind)
    return None


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
    width = sum(max(hi - lo + 1, 0) for lo, hi in spans)
    found = {metric: missing_plane(metric, len(sample.ranks), width) for metric in metrics}
    begin = 0
    for lo, hi in spans:
        if hi < lo:
            continue
        blocks = read_blocks(
            connection, run.run_id, metrics, lo, hi, rank_blocks=sample.rank_blocks
        )
        for first, planes in blocks:
            for metric, plane in planes.items():
                num = int(np.searchsorted(sample.ranks, len(plane)))  # ranks are in order
                at = slice(begin + first - lo, begin + first - lo + plane.shape[1])
                is_all = num == len(plane)
                found[metric][:num, at] = plane if is_all else plane[sample.ranks[:num]]
        begin += hi - lo + 1
    return found


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
