"""Some ranks in some steps: what is read, and put together as one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.answers import capped, json_object
from rankscope_server.api.logs.queries import parse_filters
from rankscope_server.api.selection import words
from rankscope_server.api.selection.common import Array, Member, shared_of
from rankscope_server.api.selection.facts import fact_columns, group_members, registered
from rankscope_server.api.selection.measured import (
    Measured,
    measure,
    phase_deviations,
    times_of,
)
from rankscope_server.api.selection.schema import (
    SelectedError,
    SelectedFinding,
    Selection,
    SlowRanks,
    WorstCell,
)
from rankscope_server.api.steps.cells import robust_z, usual_band
from rankscope_server.api.steps.map import peers_of, step_range
from rankscope_server.api.steps.queries import first_step, known, warm_up_steps
from rankscope_server.findings.statistics import median, middle
from rankscope_server.problems import not_found
from rankscope_server.store import tables
from rankscope_server.store.search import LogQuery, Search

MAX_RANGES = 512  # of ranks: an address holds no more
MAX_FINDINGS = 20
MAX_ERRORS = 10
MAX_HOSTS = 8


def selection(
    connection: sa.Connection, run: sa.Row[Any], ranges: list[tuple[int, int]], lo: int, hi: int
) -> Selection:
    """Return what is known of ranks, first and last of each range, in steps `lo`..`hi`.

    Raises Problem 404 where the run has none of the ranks, 422 for steps that it has not.
    """
    ranks = registered(connection, run)
    peers = peers_of(connection, run, "own_work", ranks.rows)
    chosen = np.zeros(peers.height, bool)
    for low, high in ranges:
        chosen[low : high + 1] = True
    if not chosen.any():
        raise not_found("this run has none of these ranks", f"it has {peers.height:,}", "ranks")
    lo, hi = step_range(run, lo, hi)
    if hi < lo:
        raise not_found(f"step {lo:,} was not made", f"the last is {run.step:,}", "from")
    measured = measure(connection, run, peers, chosen, lo, hi)
    through = hi + 1 if hi == run.step else hi  # a step that never ended is not counted
    findings, of_findings, total = _findings(connection, run, chosen, lo, through)
    errors, of_errors, num_kinds = _errors(connection, run, chosen, lo, through)
    groups, has_groups = group_members(connection, run, chosen)
    facts, num_facts = fact_columns(connection, run.run_id, run.attempt, peers.height)
    common, not_known = shared_of(
        chosen, [*ranks.places, *facts], [*groups, *of_findings, *of_errors]
    )
    times = times_of(connection, run, chosen, lo, hi)
    lines = None if times is None else _count_lines(connection, run.run_id, ranges, *times)
    hosts = list(dict.fromkeys(host for host in np.array(peers.hosts)[chosen].tolist() if host))
    answer = Selection(
        text="",
        ranks=words.ranges_text(chosen),
        ranks_text=words.ranks_text(chosen),
        num_ranks=int(chosen.sum()),
        world_size=peers.height,
        step_lo=lo,
        step_hi=hi,
        hosts=hosts[:MAX_HOSTS],
        hosts_capped=capped(min(len(hosts), MAX_HOSTS), len(hosts)),
        stages=_stages(ranks.rows, chosen),
        phases=phase_deviations(connection, run, peers, chosen, lo, hi),
        common=common,
        not_known=not_known,
        notes=words.notes(peers.height, has_groups=has_groups, num_facts=num_facts),
        findings=findings,
        findings_capped=capped(len(findings), total),
        errors=errors,
        errors_capped=capped(len(errors), num_kinds),
        num_lines=None if lines is None else lines[0],
        lines_are_at_least=lines is not None and not lines[1],
        from_ms=None if times is None else times[0] / 1e6,
        to_ms=None if times is None else times[1] / 1e6,
        num_ranks_read=measured.num_read,
        num_steps_read=measured.inside.stop - measured.inside.start,
        **_deviation(measured, _after_warm_up(connection, run)),
    )
    return words.with_text(answer)


def _deviation(measured: Measured, first: int) -> dict[str, Any]:
    """Return the fields about self time."""
    inside = measured.ratio[:, measured.inside]
    of_ranks = median(inside)
    ratio = middle(of_ranks)
    low, high = usual_band(measured.usual, inside.shape[1])
    slow = np.flatnonzero(of_ranks > high)
    return {
        "reference": measured.reference,
        "reference_text": words.reference_text(measured.reference),
        "ratio": known(ratio),
        "z": robust_z(ratio, measured.usual),
        "is_usual": None if np.isnan(ratio) else low <= ratio <= high,
        "before_ratio": measured.before_ratio(first),
        "self_ms": known(middle(measured.self_ms)),
        "others_ms": known(middle(median(measured.reference_ms[:, measured.inside]))),
        "slow": _slow(measured.ranks[slow], of_ranks[slow]) if len(slow) else None,
        "worst": _worst(measured, inside),
    }


def _slow(ranks: Array, of_ranks: Array) -> SlowRanks:
    chosen = np.zeros(int(ranks.max()) + 1, bool)
    chosen[ranks] = True
    return SlowRanks(
        ranks=words.ranges_text(chosen),
        text=words.ranks_text(chosen),
        count=len(ranks),
        ratio=float(of_ranks.max()),
    )


def _worst(measured: Measured, inside: Array) -> WorstCell | None:
    of_ranks = np.fmax.reduce(inside, axis=1, initial=np.nan)
    if not len(of_ranks) or np.isnan(of_ranks).all():
        return None
    row = int(np.nanargmax(of_ranks))
    column = int(np.nanargmax(inside[row]))
    ratio = float(inside[row, column])
    return WorstCell(
        rank=int(measured.ranks[row]),
        step=int(measured.steps[measured.inside][column]),
        ratio=ratio,
        z=robust_z(ratio, measured.usual),
    )


def _after_warm_up(connection: sa.Connection, run: sa.Row[Any]) -> int:
    begin = first_step(connection, run.run_id)
    return begin + warm_up_steps(run.step - begin + 1)


def _stages(rows: Mapping[int, Any], chosen: Array) -> list[int]:
    stages = {rows[rank].stage for rank in np.flatnonzero(chosen).tolist() if rank in rows}
    return sorted(stage for stage in stages if stage >= 0)


def _findings(
    connection: sa.Connection, run: sa.Row[Any], chosen: Array, lo: int, hi: int
) -> tuple[list[SelectedFinding], list[Member], int]:
    """Return findings that name a chosen rank and hold in these steps, whom they name, how many."""
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.id, table.state, table.body)
        .where(table.run_id == run.run_id)
        .order_by(table.id.desc())
    )
    found: list[SelectedFinding] = []
    members: list[Member] = []
    for row in rows:
        body = json_object(row.body)
        is_named = _mask(body.get("ranks", []), len(chosen))
        begin, end = body.get("onset_step") or 1, body.get("ended_step") or hi
        if not (is_named & chosen).any() or begin > hi or end < lo:
            continue
        what = str(body.get("what", ""))
        found.append(
            SelectedFinding(
                id=row.id, what=what, severity=str(body.get("severity", "")), state=row.state,
                num_named=int((is_named & chosen).sum()),
            )
        )  # fmt: skip
        members.append(Member("finding", "finding", what, is_named))
    found.sort(key=lambda one: one.state == "recovered")
    return found[:MAX_FINDINGS], members[:MAX_FINDINGS], len(found)


def _errors(
    connection: sa.Connection, run: sa.Row[Any], chosen: Array, lo: int, hi: int
) -> tuple[list[SelectedError], list[Member], int]:
    """Return kinds of errors that chosen ranks raised in these steps, who raised them, how many."""
    table = tables.error_event.c
    rows = connection.execute(
        sa.select(
            table.fingerprint, table.rank, sa.func.min(table.type), sa.func.min(table.message),
            sa.func.count(),
        )
        .where(table.run_id == run.run_id, table.step.between(lo, hi))
        .group_by(table.fingerprint, table.rank)
        .order_by(table.fingerprint, table.rank)
    )  # fmt: skip
    kinds: dict[str, tuple[str, str, dict[int, int]]] = {}
    for fingerprint, rank, name, message, count in rows:
        kinds.setdefault(fingerprint, (name, message, {}))[2][rank] = count
    found: list[SelectedError] = []
    members: list[Member] = []
    for name, message, counts in kinds.values():
        mine = {rank: n for rank, n in counts.items() if 0 <= rank < len(chosen) and chosen[rank]}
        if mine:
            found.append(
                SelectedError(
                    type=name, message=message, count=sum(mine.values()), num_ranks=len(mine)
                )
            )
            members.append(Member("error", "error", name, _mask(list(counts), len(chosen))))
    found.sort(key=lambda one: -one.count)
    return found[:MAX_ERRORS], members[:MAX_ERRORS], len(found)


def _mask(ranks: list[int], height: int) -> Array:
    mask = np.zeros(height, bool)
    mask[[rank for rank in ranks if 0 <= rank < height]] = True
    return mask


def _count_lines(
    connection: sa.Connection, run_id: str, ranges: list[tuple[int, int]], from_ns: int, to_ns: int
) -> tuple[int, bool]:
    """Return how many lines at warning or worse there are, and whether all were counted."""
    text = ",".join(f"{low}-{high}" for low, high in ranges)
    filters = parse_filters(rank=text, min_level="WARNING")
    found = Search(
        connection, run_id, LogQuery(filters=filters, from_ns=from_ns, to_ns=to_ns)
    ).page(1)
    return max(found.counts.total, len(found.lines)), found.is_counted
