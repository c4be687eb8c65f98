"""A recording of few steps, as a profile is: ranks that hold up all others in nearly each of them.

That is too little for an onset and for whether it lasts. But one of N ranks is the slowest in each
of n steps by chance once in N^(n-1) recordings, and all its steps are longer than all those of the
others in fewer still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope_server.diagnose.shared.comparison import roles_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array
from rankscope_server.findings.text import (
    capital,
    ms_text,
    percent_text,
    ranks_text,
    ratio_text,
)
from rankscope_server.observe.step_table import OWN_PHASES


@dataclass(frozen=True, slots=True)
class _Apart:
    """Ranks that are slower than the others of their role; rows of the step table."""

    rows: Array
    others: Array
    columns: Array  # of the step table
    num_slowest: int  # steps in which all of them are slower than all others
    chance: float  # that a recording without a slow rank looks so


def slow_in_most(window: Window) -> list[Finding]:
    """Return the ranks that are slower than their peers in most steps of a recording."""
    table, roles = window.steps, roles_of(window)
    own = table.get("own").astype(float)
    found = []
    for role in dict.fromkeys(roles.values()):
        rows = np.flatnonzero([roles[rank] == role for rank in table.ranks])
        if not len(rows):
            continue  # of ranks without a step
        columns = np.flatnonzero(~np.isnan(own[rows]).any(axis=0))
        while (apart := _apart(own, rows, columns, window.policy)) is not None:
            finding = _finding(window, apart)
            if (finding.cost_throughput_ratio or 0.0) < window.policy.cost_silent_ratio:
                break
            found.append(finding)
            rows = apart.others  # a second one may hide behind the slowest
    return found


def _apart(own: Array, rows: Array, columns: Array, policy: Policy) -> _Apart | None:
    """Return the fewest rows, at most half, that are slower than the others in most steps."""
    if len(rows) < 2 or not len(columns):
        return None
    mine = own[np.ix_(rows, columns)]
    order = np.argsort(-np.median(mine, axis=1), kind="stable")
    for count in range(1, len(rows) // 2 + 1):
        slow, rest = mine[order[:count]], mine[order[count:]]
        ahead = int(np.sum(slow.min(axis=0) > rest.max(axis=0)))
        chance = _chance(slow, rest, ahead, policy)
        ratio = np.median(np.median(slow, axis=0) / np.median(rest, axis=0))
        is_clear = ahead >= policy.short_share * len(columns) and chance <= policy.short_chance
        if is_clear and np.log(ratio) > policy.ln_entry_floor:
            return _Apart(rows[order[:count]], rows[order[count:]], columns, ahead, chance)
    return None


def _chance(slow: Array, rest: Array, ahead: int, policy: Policy) -> float:
    """Return how likely some rows as many as these are so far ahead if no row is slower.

    Either in so many steps, each of which any of the rows may win, or with all their times above
    all others by a margin: of all orders of the times few are so.
    """
    (count, steps), num_rows = slow.shape, len(slow) + len(rest)
    ways = math.comb(num_rows, count)
    if slow.min() > math.exp(policy.ln_entry_floor) * rest.max():
        return min(1.0, ways / math.comb(num_rows * steps, count * steps))
    tail = sum(
        math.comb(steps, wins) * (ways - 1) ** (steps - wins) for wins in range(ahead, steps + 1)
    )
    return min(1.0, float(ways * (tail / ways**steps)))


def _finding(window: Window, apart: _Apart) -> Finding:
    table, policy, columns = window.steps, window.policy, apart.columns
    own, duration = table.get("own").astype(float), table.get("duration").astype(float)
    ranks = tuple(sorted(table.ranks[row] for row in apart.rows.tolist()))
    mine, theirs = own[np.ix_(apart.rows, columns)], own[np.ix_(apart.others, columns)]
    took = np.nanmax(duration[np.ix_(apart.rows, columns)], axis=0)
    shares = np.clip(mine.max(axis=0) - theirs.max(axis=0), 0.0, None) / took
    cost = float(np.average(shares, weights=took))
    lost = (
        f". The recorded steps lose {percent_text(cost)} to {_it(ranks)}, "
        f"{percent_text(float(shares.min()))} to {percent_text(float(shares.max()))} each"
    )
    if (whole := window.facts.slowdown) is not None and cost > 1 - 1 / whole.ratio:
        cost = max(0.0, 1 - 1 / whole.ratio)  # what it holds up overlaps with what others wait for
        lost = (
            f". S = {whole.ratio:.3f}: a step takes {ms_text(whole.step_ms)}, against "
            f"{ms_text(whole.ideal_ms)} if all ranks did each operation equally fast, so that at "
            f"most {percent_text(cost)} is lost to {_it(ranks)}"
        )
    excess = {name: _excess(table.get(name), apart) for name in OWN_PHASES}
    phase = max(excess, key=lambda name: excess[name])
    kind = "slow_data" if phase == "data" else "slow_compute"
    ratio = float(np.median(np.median(mine, axis=0) / np.median(theirs, axis=0)))
    return window.finding(
        kind,
        f"{kind}/{'+'.join(map(str, ranks))}",
        severity=severity_of_cost(cost, policy),
        ranks=ranks,
        cost=cost,
        what=_what(window, apart, ranks, ratio) + ", waiting for data" * (phase == "data"),
        why=_why(ranks, apart, mine, theirs, "waiting for data" if phase == "data" else phase)
        + lost,
        next=f"See in the recording what {ranks_text(ranks)} "
        f"{'do' if len(ranks) > 1 else 'does'} in that phase and the others do not; record some "
        "minutes to know whether it lasts",
        confidence=(
            0.7,
            f"{len(columns)} steps; without a slow rank one in {_one_in(apart.chance)} recordings "
            "looks so. Since when, and whether it lasts, is not known",
        ),
        evidence=(
            Evidence(
                f"Self time of {ranks_text(ranks)}: {_range(mine)}; of {_peers(apart, ranks)}: "
                f"{_range(theirs)}",
                window.link(ranks[0], int(table.steps[columns[0]])),
            ),
        ),
        ruled_out=("Waiting for other ranks: what collectives waited is not in these times",),
        disproof="These steps are not like others, for example "
        f"{'they' if len(ranks) > 1 else 'it'} alone saved or evaluated in them",
        victims=window.others(ranks),
    )


def _what(window: Window, apart: _Apart, ranks: tuple[int, ...], ratio: float) -> str:
    who = window.who(ranks)
    steps = len(apart.columns)
    every = "each" if apart.num_slowest == steps else f"{apart.num_slowest}"
    return (
        f"{who} {'are' if len(ranks) > 1 else 'is'} {ratio_text(ratio)} slower than "
        f"{_peers(apart, ranks)} in {every} of the {steps} steps recorded"
    )


def _why(ranks: tuple[int, ...], apart: _Apart, mine: Array, theirs: Array, where: str) -> str:
    verb = "work" if len(ranks) > 1 else "works"
    return (
        f"{capital(ranks_text(ranks))} {verb} {ms_text(float(np.median(mine)))} a step without "
        f"waiting for others, against {ms_text(float(np.median(theirs)))} of "
        f"{_peers(apart, ranks)}; most of the excess is in {where}"
    )


def _peers(apart: _Apart, ranks: tuple[int, ...]) -> str:
    whose = "their" if len(ranks) > 1 else "its"
    return f"{whose} {len(apart.others)} peers" if len(apart.others) > 1 else f"{whose} peer"


def _it(ranks: tuple[int, ...]) -> str:
    return "them" if len(ranks) > 1 else "it"


def _range(times: Array) -> str:
    return f"{ms_text(float(times.min()))} to {ms_text(float(times.max()))}"


def _one_in(chance: float) -> str:
    return "a million" if chance < 1e-6 else f"{1 / chance:,.0f}"


def _excess(values: Array, apart: _Apart) -> float:
    reference = np.median(np.nan_to_num(values[np.ix_(apart.others, apart.columns)]), axis=0)
    return float(np.median(np.nan_to_num(values[np.ix_(apart.rows, apart.columns)]) - reference))
