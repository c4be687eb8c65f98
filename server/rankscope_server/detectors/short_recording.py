"""A recording of few steps, as a profile is: a rank that holds up all others in each of them.

That is too little for an onset and for whether it lasts. But a rank that is the slowest of N in
each of n steps is so by chance once in N^(n-1) recordings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.formulas import rank_hours_per_day
from rankscope_server.detectors.comparison import roles_of
from rankscope_server.detectors.cost_severity import severity_of
from rankscope_server.detectors.finding import Evidence, Finding
from rankscope_server.detectors.step_table import OWN_PHASES
from rankscope_server.detectors.window import Window
from rankscope_server.detectors.words import (
    capital,
    ms_text,
    percent_text,
    place_text,
    times_text,
)

Array = NDArray[Any]


def slow_in_all(window: Window) -> list[Finding]:
    """Return the ranks that are slower than their peers in every step of a short recording."""
    table, policy = window.steps, window.policy
    own = table.get("own").astype(float)
    columns = np.flatnonzero(~np.isnan(own).any(axis=0))
    roles = roles_of(window)
    found = []
    for role in dict.fromkeys(roles.values()):
        rows = np.array([row for row, rank in enumerate(table.ranks) if roles[rank] == role])
        if len(rows) < 2 or not len(columns):
            continue
        mine = own[np.ix_(rows, columns)]
        slowest = np.unique(np.argmax(mine, axis=0))
        chance = float(len(rows)) ** (1 - len(columns))
        if len(slowest) > 1 or chance > policy.short_chance:
            continue
        row, others = int(rows[slowest[0]]), np.delete(rows, slowest[0])
        reference = np.median(own[np.ix_(others, columns)], axis=0)
        if np.log(np.median(own[row, columns] / reference)) > policy.ln_entry_floor:
            found.append(_finding(window, row, others, columns, chance))
    return [one for one in found if (one.cost_throughput_ratio or 0.0) >= policy.cost_silent_ratio]


def _finding(window: Window, row: int, others: Array, columns: Array, chance: float) -> Finding:
    table, policy = window.steps, window.policy
    own, duration = table.get("own").astype(float), table.get("duration").astype(float)
    rank, steps = table.ranks[row], len(columns)
    mine = own[row, columns]
    theirs = own[np.ix_(others, columns)]
    shares = np.clip(mine - theirs.max(axis=0), 0.0, None) / duration[row, columns]
    cost = float(np.average(shares, weights=duration[row, columns]))
    excess = {name: _excess(table.get(name), row, others, columns) for name in OWN_PHASES}
    phase = max(excess, key=lambda name: excess[name])
    kind = "slow_data" if phase == "data" else "slow_compute"
    who = capital(place_text((rank,), window.hosts((rank,))))
    peers = f"its {len(others)} peers" if len(others) > 1 else "its peer"
    own_ms, reference_ms = float(np.median(mine)), float(np.median(theirs))
    verb = "waits for data and is" if kind == "slow_data" else "computes"
    return Finding(
        key=f"{window.attempt}/straggler/{kind}/{rank}",
        detector="straggler",
        kind=kind,
        severity=severity_of(cost, policy),
        attempt=window.attempt,
        ranks=(rank,),
        hosts=window.hosts((rank,)),
        cost_throughput_ratio=cost,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, cost),
        what=f"{who} {verb} {times_text(own_ms / reference_ms)} as slow as {peers} in each of the "
        f"{steps} steps recorded",
        why=f"Rank {rank} works {ms_text(own_ms)} a step without waiting for others, against "
        f"{ms_text(reference_ms)} of {peers}; most of the excess is in {phase}. The recorded steps "
        f"lose {percent_text(cost)} to it, {percent_text(float(shares.min()))} to "
        f"{percent_text(float(shares.max()))} each",
        next="See in the profile what this rank does in that phase and the others do not; record "
        "some minutes to know whether it lasts",
        confidence=0.7,
        confidence_text=f"medium: {steps} steps, of all of which it is the slowest; by chance one "
        f"in {1 / chance:,.0f} recordings looks so. Since when, and whether it lasts, is not known",
        evidence=(
            Evidence(
                f"Own work of rank {rank}: {ms_text(float(mine.min()))} to "
                f"{ms_text(float(mine.max()))}; of {peers}: {ms_text(float(theirs.min()))} to "
                f"{ms_text(float(theirs.max()))}",
                window.link(rank, int(table.steps[columns[0]])),
            ),
        ),
        ruled_out=("Waiting for other ranks: what collectives waited is not in these times",),
        would_be_wrong_if="These steps are not like others: it alone saved, evaluated or profiled",
        policy_hash=policy.hash,
        victims=tuple(other for other in sorted(table.ranks) if other != rank),
    )


def _excess(values: Array, row: int, others: Array, columns: Array) -> float:
    reference = np.median(np.nan_to_num(values[np.ix_(others, columns)]), axis=0)
    return float(np.median(np.nan_to_num(values[row, columns]) - reference))
