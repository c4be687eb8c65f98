"""The reference of the map: how each rank's self time compares, step by step.

Ranks in a role of at least `min_role_size` ranks are compared with the median of the others of
that role in the same step; the rest with their own median over early healthy steps, because there
is no rank that does the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.statistics import median, others_median

Reference: TypeAlias = Literal["peers", "own"]
Matrix: TypeAlias = NDArray[Any]  # of floats, ranks x steps


@dataclass(frozen=True, slots=True)
class Ratios:
    """Self time over its reference; NaN where either is not known."""

    ratio: Matrix
    reference: Matrix  # in the unit of the self time
    kinds: tuple[Reference, ...]  # per rank

    @property
    def kind(self) -> Reference | None:
        """Return the kind that most ranks have, None for no ranks."""
        if not self.kinds:
            return None
        return "peers" if self.kinds.count("peers") * 2 >= len(self.kinds) else "own"


def ratios(
    own_work: Matrix,
    roles: Sequence[Hashable],
    early: Matrix | None = None,
    policy: Policy = POLICY,
) -> Ratios:
    """Return each cell's ratio to its reference.

    `own_work` is ranks x steps in any unit, `roles` has one entry per rank. `early` holds the
    first steps of the attempt, ranks x steps, for the ranks' own reference; None: `own_work`
    begins with them. The warm-up is left out of it.
    """
    work = np.asarray(own_work, np.float64)
    if work.ndim != 2 or len(work) != len(roles):
        raise ValueError(f"{work.shape} cells do not fit {len(roles)} roles")
    kinds = reference_kinds(roles, policy)
    reference = np.full(work.shape, np.nan)
    for rows in _rows_by_role(tuple(roles)):
        own = work[rows]
        if kinds[rows.start if isinstance(rows, slice) else rows[0]] == "peers" and own.shape[1]:
            reference[rows] = others_median(own, max(3, int(np.ceil(0.75 * len(own)))))
    alone = [row for row, kind in enumerate(kinds) if kind == "own"]
    first = work if early is None else early
    begin = policy.warmup_steps if first.shape[1] > policy.warmup_steps else 0
    healthy = np.asarray(first[alone, begin : begin + policy.baseline_steps], np.float64)
    if healthy.size:
        reference[alone] = median(healthy)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(reference > 0, work / reference, np.nan)
    return Ratios(ratio, reference, kinds)


def reference_kinds(roles: Sequence[Hashable], policy: Policy = POLICY) -> tuple[Reference, ...]:
    """Return for each rank with what it is compared."""
    return _kinds(tuple(roles), policy.min_role_size)


@lru_cache(maxsize=16)  # a map asks for each block of its steps
def _kinds(roles: tuple[Hashable, ...], min_role_size: int) -> tuple[Reference, ...]:
    sizes = Counter(roles)
    return tuple("peers" if sizes[role] >= min_role_size else "own" for role in roles)


@lru_cache(maxsize=16)
def _rows_by_role(roles: tuple[Hashable, ...]) -> tuple[slice | list[int], ...]:
    """Return the rows of each role, as a slice where they follow each other: it copies nothing."""
    found: dict[Hashable, list[int]] = {}
    for row, role in enumerate(roles):
        found.setdefault(role, []).append(row)
    return tuple(
        slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] < len(rows) else rows
        for rows in found.values()
    )
