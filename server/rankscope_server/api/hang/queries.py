"""Which rank waits for which, read from what the store holds of an attempt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import capped
from rankscope_server.api.findings.queries import findings as all_findings
from rankscope_server.api.findings.schema import Findings, ShownFinding
from rankscope_server.api.hang import icicle, stacks, words
from rankscope_server.api.hang.equal_ranks import fold
from rankscope_server.api.hang.places import places
from rankscope_server.api.hang.ranges import rank_set
from rankscope_server.api.hang.schema import (
    HangAnswer,
    HangFinding,
    Standing,
    WaitEdge,
    WaitGraphAnswer,
    WaitNode,
)
from rankscope_server.api.hang.standings import Remembered, Standings, Waits, waits_of
from rankscope_server.api.hang.stored import StoredWindow, window_of
from rankscope_server.findings.finding import NOT_HERE
from rankscope_server.text import plural

MAX_BESIDE = 6
KINDS = frozenset(("hang", "desync"))
_OVER = frozenset(("ended", "failed"))
State = Literal["hang", "desync", "waiting", "over", "none", "unknown"]


def hang(
    connection: sa.Connection,
    run: sa.Row[Any],
    attempt: int | None,
    ranks: Sequence[int],
    group: str,
) -> HangAnswer:
    """Return who waits for whom in an attempt, by default the newest; stacks of `ranks`."""
    number = run.attempt if attempt is None else attempt
    window = window_of(connection, run, number, time.time_ns())
    is_over = number < run.attempt or run.status in _OVER or run.launcher == IMPORTED
    known = all_findings(connection, run)
    ours = _ours(known, number)
    is_still = bool(ours) and ours[0].state != "recovered"
    waits = waits_of(window)
    # Who gave up, or was ended, is in no operation any more: then the finding knows more.
    is_short = is_still and len(waits.operations) < len(ours[0].victims)
    is_remembered = is_short and (is_over or not waits.operations)
    standings = Standings(window, waits, _remembered(window, ours[0]) if is_remembered else None)
    say = words.Say(window, is_over=is_over)
    graph = (
        _of_finding(window, standings, say, ours[0])
        if is_remembered
        else fold(window, waits, standings, say)
    )
    named = ours[0].ranks if is_still else []
    roots = frozenset(named if is_remembered else waits.roots or named)
    shown = [_shown(one) for one in ours]
    text, detail, state = _answer(known, ours, shown, window, waits, graph, is_over)
    found, num_groups, num_quiet = places(window, waits, standings, group)
    since_ms = ours[0].onset_ms if is_still else None
    taken = stacks.newest(connection, run.run_id, number, since_ms)
    suggested = _suggested(ours, graph, waits, taken)
    beside = [rank for rank in dict.fromkeys(ranks) if rank in window.ranks][:MAX_BESIDE]
    beside = beside or suggested
    wanted = stacks.to_merge(taken, [*beside, *sorted(roots)])
    dumps = stacks.read(connection, wanted)
    frames = {rank: icicle.frames_of(dump.text) for rank, dump in dumps.items()}
    return HangAnswer(
        text=text,
        detail=detail,
        state=state,
        attempt=number,
        is_over=is_over,
        last_ms=None if window.last_ns is None else window.last_ns / 1e6,
        findings=shown,
        graph=graph,
        groups=found,
        num_groups=num_groups,
        num_quiet_groups=num_quiet,
        groups_capped=None if group else capped(len(found), num_groups),
        stacks=stacks.side_by_side(window, standings, roots, dumps, frames, beside, since_ms),
        merged=stacks.merged(window, roots, dumps, frames, len(taken)),
        suggested=suggested,
        notes=_notes(window, waits, graph, has_ends=is_over and run.launcher != IMPORTED),
    )


def _ours(known: Findings, attempt: int) -> list[ShownFinding]:
    """Return the findings of an attempt that say that ranks wait or differ; open ones first."""
    every = [*known.open, *known.recovered]
    found = [one for one in every if one.kind in KINDS and one.attempt == attempt]
    return sorted(found, key=lambda one: (one.state == "recovered", one.kind != "hang", one.id))


def _shown(one: ShownFinding) -> HangFinding:
    return HangFinding(
        id=one.id, kind=one.kind, what=one.what, why=one.why, severity=one.severity,
        state=one.state, ranks=one.ranks, num_victims=len(one.victims),
        onset_step=one.onset_step, onset_ms=one.onset_ms,
    )  # fmt: skip


def _answer(
    known: Findings,
    ours: Sequence[ShownFinding],
    shown: Sequence[HangFinding],
    window: StoredWindow,
    waits: Waits,
    graph: WaitGraphAnswer,
    is_over: bool,
) -> tuple[str, str, State]:
    """Return the page's first sentence, what stands below it, and which kind of answer it is."""
    if ours and ours[0].state != "recovered":
        first = _explaining(known, ours[0])
        return first.what, first.why, "desync" if ours[0].kind == "desync" else "hang"
    if graph.nodes:
        return words.waiting_text(graph, is_over=is_over), "", "waiting"
    if window.world_size == 1:
        return "One rank waits for no other", "", "none"
    if waits.unclear:
        return "Whether a rank waits is unknown", words.unclear_text(waits), "unknown"
    lack = next((one for one in known.detectors if one.name == "hang"), None)
    if not window.states:
        reason = lack.reason if lack is not None and lack.state == "skipped" else ""
        return (
            "Whether a rank waits is unknown",
            reason or "no rank has said yet where it is",
            "unknown",
        )
    if lack is not None and lack.state == "skipped" and lack.remedy != NOT_HERE:
        return f"Whether a rank waits is unknown: {lack.reason}", lack.remedy, "unknown"
    if ours and not is_over:
        return words.over_text(shown[0]), ours[0].why, "over"
    is_clean = window.ranks and all(end.reason == "clean" for end in window.ended.values())
    num_clean = len(window.ranks) if is_clean and window.num_ended == len(window.ranks) else 0
    text, detail = words.no_wait_text(waits, num_clean, is_over=is_over)
    return text, detail, "none"


def _explaining(known: Findings, finding: ShownFinding) -> ShownFinding:
    """Return the finding that explains this one in the end, or itself."""
    by_id = {one.id: one for one in (*known.open, *known.recovered)}
    seen = set[int]()
    while finding.explained_by in by_id and finding.id not in seen:
        seen.add(finding.id)
        finding = by_id[finding.explained_by]
    return finding


def _remembered(window: StoredWindow, finding: ShownFinding) -> Remembered:
    """Return where ranks stood, as a finding says it."""
    waited = max((window.states[r].step for r in finding.victims if r in window.states), default=0)
    found: dict[int, Standing] = dict.fromkeys(finding.victims, "waiting")
    for rank in finding.ranks:
        state = window.states.get(rank)
        has_left = state is not None and waited and state.step > waited + 1
        found[rank] = "missing" if finding.kind == "hang" else "left" if has_left else "differs"
    return Remembered(finding.group or "", found)


def _of_finding(
    window: StoredWindow, standings: Standings, say: words.Say, finding: ShownFinding
) -> WaitGraphAnswer:
    """Return the graph that a finding stands for, where the last records show it no more."""
    victims = [rank for rank in finding.victims if rank not in finding.ranks]
    where = f"in group {finding.group}" if finding.group else "in a collective"
    parts = ((0, finding.ranks, "named by the finding"), (1, victims, f"waited {where}"))
    nodes = [
        WaitNode(
            id=place, depth=depth, standing=standings.of(ranks[0]), is_root=depth == 0,
            is_transfer=False, ranks=rank_set(window, ranks), text=text, operation="",
            num_groups=1, waited_seconds=None,
        )
        for place, (depth, ranks, text) in enumerate(part for part in parts if part[1])
    ]  # fmt: skip
    is_pair = len(nodes) == 2
    return WaitGraphAnswer(
        nodes=nodes,
        edges=[WaitEdge(source=1, target=0, text=say.edge(nodes[1], nodes[0]))] if is_pair else [],
        num_waiting=len(victims),
        num_waited_for=len(finding.ranks),
        is_of_finding=True,
    )


def _suggested(
    ours: Sequence[ShownFinding], graph: WaitGraphAnswer, waits: Waits, taken: dict[int, int]
) -> list[int]:
    """Return one rank that others wait for and a typical one that waits, with stacks if any has."""
    named = list(waits.roots) or (ours[0].ranks if ours else [])
    waiting = [
        rank
        for node in graph.nodes if node.depth > 0 and not node.is_transfer
        for rank in node.ranks.some
    ]  # fmt: skip
    waiting += [rank for rank in waits.operations if rank not in waits.roots]
    waiting += list(ours[0].victims) if ours else []
    pair = []
    for some in (named, [rank for rank in waiting if rank not in named]):
        if some:
            pair.append(next((rank for rank in some if rank in taken), some[0]))
    return pair or sorted(taken)[:2]


def _notes(
    window: StoredWindow, waits: Waits, graph: WaitGraphAnswer, *, has_ends: bool
) -> list[str]:
    notes = []
    if graph.is_of_finding:
        notes.append(
            "The last records of the ranks no longer show all who waited: what is drawn is what "
            "the finding says"
        )
    if waits.unclear and graph.nodes:
        notes.append(words.unclear_text(waits))
    lacking = window.world_size - len({*window.states, *window.ended})
    if lacking > 0:
        where = "it is" if lacking == 1 else "they are"
        notes.append(f"{plural(lacking, 'rank')} never said where {where}")
    if has_ends and window.num_ended < len(window.ranks):
        count = len(window.ranks) - window.num_ended
        notes.append(f"The end of {plural(count, 'rank')} was not seen")
    return notes
