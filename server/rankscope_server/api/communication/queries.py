"""What was communicated in some steps, as the API answers it: reads calls, groups, preflight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import RANK
from rankscope_server.answers import LeftOut, capped
from rankscope_server.api.communication import links as linking
from rankscope_server.api.communication import words
from rankscope_server.api.communication.calls import (
    NO_SIZE,
    NUMBERS,
    Calls,
    Meetings,
    meetings,
    transfers,
)
from rankscope_server.api.communication.rows import LAST_SHOWN, Row, last_of, percentiles, rows_of
from rankscope_server.api.communication.schema import (
    Communication,
    CommunicationRow,
    LastArrival,
    LinkCell,
    LinkNode,
    Links,
)
from rankscope_server.api.preflight.matrix import value_of
from rankscope_server.api.preflight.queries import listing
from rankscope_server.api.ranks.chunks import (
    MAX_CHUNKS,
    Chosen,
    Codes,
    Wanted,
    choose,
    read,
)
from rankscope_server.api.ranks.collectives import Group, groups_of, is_wait_known
from rankscope_server.api.ranks.thinned import thinned_of
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows
from rankscope_server.api.steps.queries import median_step_ms
from rankscope_server.preflight.store import reports_of
from rankscope_server.store import tables

USUAL_STEPS = 50  # that are looked at where none are asked for: the newest
MAX_CALLS = 500_000  # that one answer matches: about a second
MAX_ROWS = 300
MAX_NODES = 40  # of the matrix
MAX_LISTED_NODES = 1_024
_NAMES = frozenset((*NUMBERS, "group", "operation"))
_MS = 1e6


@dataclass(frozen=True, slots=True)
class _Job:
    """What rows need to know of the run."""

    run: sa.Row[Any]
    groups: Mapping[str, Group]
    host_of: Mapping[int, str]
    num_steps: float  # that were recorded whole
    world_size: int
    measured: Mapping[linking.Pair, linking.Link]  # by the preflight


def communication(connection: sa.Connection, run: sa.Row[Any], wanted: Wanted) -> Communication:
    """Return what was communicated in a range of steps of one attempt, by default the newest."""
    attempt = run.attempt if wanted.attempt is None else wanted.attempt
    first, last = _steps(connection, run, replace(wanted, attempt=attempt))
    inside = replace(wanted, attempt=attempt, lo=first, hi=last)
    chosen = choose(connection, inside, MAX_CALLS)
    if chosen.is_cut and chosen.lo is not None and chosen.lo <= last:
        inside = replace(inside, lo=max(first, chosen.lo))
    calls = calls_of(connection, chosen, inside)
    first = inside.lo or first
    thinned = thinned_of(connection, inside, run.world_size)
    groups = groups_of(connection, run, attempt)
    host_of = {row.rank: row.host for row in rank_rows(connection, run.run_id, attempt, RANK_HEAD)}
    members = {name: len(group.ranks) for name, group in groups.items()}
    met = meetings(calls, members, host_of)
    measured = linking.links_of_preflight(_preflight(connection, run))
    num_steps = max((last - first + 1) * (1 - thinned.share), 1)
    job = _Job(run, groups, host_of, num_steps, run.world_size or len(host_of) or 1, measured)
    rows = sorted(
        (_answer(row, job) for row in rows_of(calls, met, members)),
        key=lambda row: (-(row.exposed_ms_per_step or 0), -row.count),
    )
    step_ms = median_step_ms(connection, run.run_id, first, last)
    ends = _last_arrivals(met, job)
    return Communication(
        text=words.first_sentence(rows, step_ms, run.world_size, first, last),
        attempt=attempt,
        step_lo=first,
        step_hi=last,
        step_ms=step_ms,
        count=len(calls),
        rows=rows[:MAX_ROWS],
        last=ends[:LAST_SHOWN],
        links=_links(calls, job),
        notes=words.notes(rows, met.num_incomplete, len(met.group)),
        capped=capped(MAX_ROWS, len(rows)),
        last_capped=capped(LAST_SHOWN, len(ends)),
        left_out=_uncounted(chosen, first, last) + thinned.left_out,
    )


def _steps(connection: sa.Connection, run: sa.Row[Any], wanted: Wanted) -> tuple[int, int]:
    """Return the first and last step to look at, last < first for none."""
    table = tables.attempt.c
    row = connection.execute(
        sa.select(table.step_lo, table.step_hi).where(
            table.run_id == run.run_id, table.attempt == wanted.attempt
        )
    ).first()
    if row is None or row.step_hi is None:
        return 1, 0
    begin, end = max(1, row.step_lo or 1), int(row.step_hi)
    hi = end if wanted.hi is None else min(wanted.hi, end)
    usual = begin if wanted.hi is not None else max(begin, hi - USUAL_STEPS + 1)
    return (usual if wanted.lo is None else max(begin, wanted.lo)), hi


def calls_of(connection: sa.Connection, chosen: Chosen, inside: Wanted) -> Calls:
    """Return the calls of some steps from their chunks, columns side by side."""
    columns: dict[str, list[Any]] = {name: [] for name in (*NUMBERS, "rank", "group", "operation")}
    groups, operations = Codes(), Codes()
    for part in read(connection, chosen.ids, _NAMES):
        rows = np.flatnonzero(inside.holds(part.numbers))
        if not len(rows):
            continue
        for name in NUMBERS:
            columns[name].append(part.numbers[name][rows].astype(np.int64))
        columns["rank"].append(part.numbers[RANK][rows])
        columns["group"].append(groups.of(part.words["group"], rows))
        columns["operation"].append(operations.of(part.words["operation"], rows))
    joined = {
        name: np.concatenate(parts) if parts else np.zeros(0, np.int64)
        for name, parts in columns.items()
    }
    return Calls(
        rank=joined["rank"],
        group=joined["group"],
        operation=joined["operation"],
        numbers={name: joined[name] for name in NUMBERS},
        groups=groups.words,
        operations=operations.words,
    )


def _answer(row: Row, job: _Job) -> CommunicationRow:
    group = job.groups.get(row.group)
    ranks = len(group.ranks) if group is not None else job.world_size
    per_rank = job.num_steps * ranks
    is_known = is_wait_known(job.run, group, row.blocked_ms * _MS, row.count)
    hosts = {job.host_of.get(rank, "") for rank in group.ranks} - {""} if group else set()
    expected = linking.expected_of(hosts, job.measured)
    p50, p95, p99 = percentiles(row.durations_ms)
    return CommunicationRow(
        group=row.group,
        group_text="" if group is None else group.text,
        operation=row.operation,
        num_ranks=None if group is None else ranks,
        num_nodes=len(hosts) or None,
        size_lo=0 if row.octave == NO_SIZE else 1 << row.octave,
        size_hi=0 if row.octave == NO_SIZE else 2 << row.octave,
        size_least=row.sizes[0],
        size_largest=row.sizes[1],
        count=row.count,
        open=row.num_open,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        exposed_ms_per_step=row.blocked_ms / per_rank if is_known else None,
        overlapped_ms_per_step=None
        if row.overlapped_ms is None or not is_known
        else row.overlapped_ms / per_rank,
        num_matched=row.num_matched,
        algbw_bytes_per_second=row.algbw,
        busbw_bytes_per_second=row.busbw,
        busbw_best_bytes_per_second=row.busbw_best,
        expected_bytes_per_second=None if expected is None else expected.bytes_per_second,
        expected_text=words.expected_text(expected, len(hosts)),
        spread_p50_ms=row.spread_p50_ms,
        spread_p95_ms=row.spread_p95_ms,
        last=[
            LastArrival(
                rank=one.rank,
                host=job.host_of.get(one.rank, ""),
                count=one.count,
                share=one.count / row.num_matched,
                waited_ms_per_step=one.waited_ms / job.num_steps,
            )
            for one in row.last
        ],
        num_last_unknown=row.num_unsure,
        last_capped=capped(len(row.last), row.num_last),
    )


def _last_arrivals(met: Meetings, job: _Job) -> list[LastArrival]:
    """Return the ranks that arrived last in any collective, for whom most was waited first."""
    return [
        LastArrival(
            rank=one.rank,
            host=job.host_of.get(one.rank, ""),
            count=one.count,
            share=one.count / len(met.group),
            waited_ms_per_step=one.waited_ms / job.num_steps,
        )
        for one in last_of(met, np.arange(len(met.group)))
    ]


def _preflight(connection: sa.Connection, run: sa.Row[Any]) -> dict[linking.Pair, float]:
    """Return Mbit/s from host to host of the newest preflight of this run."""
    found = listing(connection, run.project, run.run_id, 1, 0).preflights
    if not found:
        return {}
    reports = reports_of(connection, found[0].id)
    names = {
        node: report.facts.host.hostname if report.facts.host is not None else node
        for node, report in reports.items()
    }
    speeds = {}
    for node, report in reports.items():
        for peer, edge in report.edges.items():
            speed = value_of(edge, "mbit")
            if speed is not None:
                speeds[names[node], names.get(peer, peer)] = speed
    return speeds


def _links(calls: Calls, job: _Job) -> Links:
    by_messages = linking.links_of_messages(transfers(calls, job.host_of), job.host_of)
    every = sorted(set(job.host_of.values()) - {""})
    known = set(every)
    here = {
        way: link
        for way, link in job.measured.items()
        if way[0] != way[1] and known.issuperset(way)
    }
    nodes = linking.shown_hosts(every, {**here, **by_messages}, MAX_NODES)
    is_cut = len(nodes) < len(every)
    lists = [linking.by_node(every, some) if is_cut else [] for some in (by_messages, here)]
    messages_by_node, preflight_by_node = (
        [_node(one, len(every)) for one in some[:MAX_LISTED_NODES]] for some in lists
    )
    return Links(
        nodes=nodes,
        messages=[[_cell(by_messages.get((one, other))) for other in nodes] for one in nodes],
        preflight=[[_cell(here.get((one, other))) for other in nodes] for one in nodes],
        num_messages=len(by_messages),
        num_preflight=len(here),
        text=words.links_text(by_messages, here),
        messages_by_node=messages_by_node,
        preflight_by_node=preflight_by_node,
        capped=capped(len(nodes), len(every)),
        by_node_capped=capped(MAX_LISTED_NODES, max(map(len, lists))),
    )


def _node(one: linking.NodeWays, num_nodes: int) -> LinkNode:
    return LinkNode(
        node=one.node, start=one.start, end=one.end, bytes_per_second=one.link.bytes_per_second,
        is_at_least=one.link.is_at_least, median_bytes_per_second=one.median_bytes_per_second,
        num_measured=one.num_measured, num_ways=2 * (num_nodes - 1),
    )  # fmt: skip


def _cell(link: linking.Link | None) -> LinkCell:
    if link is None:
        return LinkCell(bytes_per_second=None, source="", count=0, size_bytes=0, is_at_least=False)
    return LinkCell(
        bytes_per_second=link.bytes_per_second, source=link.source, count=link.count,
        size_bytes=link.size_bytes, is_at_least=link.is_at_least,
    )  # fmt: skip


def _uncounted(chosen: Chosen, first: int, last: int) -> list[LeftOut]:
    if not chosen.is_cut:
        return []
    most = f"one answer reads {MAX_CALLS:,} calls or {MAX_CHUNKS:,} parts; ask for fewer steps"
    if chosen.lo is not None and chosen.lo <= last:
        return [LeftOut(what=f"steps before {first:,}: {most}", count=None)]
    return [LeftOut(what=f"calls of some ranks: {most}", count=None)]
