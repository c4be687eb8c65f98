"""Fail-slow ranks: who, since which step, in which phase, at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.shared.comparison import as_devices_report, lack_of, roles_of
from rankscope_server.diagnose.shared.gaps import without_calls
from rankscope_server.diagnose.straggler.case import Case, finding_of, name_of
from rankscope_server.diagnose.straggler.cause import Suspect, cause_of
from rankscope_server.diagnose.straggler.events import (
    each_proved,
    events_of,
    lasts,
    seconds_of,
    without_global,
)
from rankscope_server.diagnose.straggler.other_references import (
    is_outdone,
    slow_from_start,
    slow_majority,
)
from rankscope_server.diagnose.straggler.recurring import in_turn, joined
from rankscope_server.diagnose.straggler.short_recording import slow_in_most
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, Severity, ran, skipped
from rankscope_server.findings.kinds import MORE_WORK
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import median, middle
from rankscope_server.findings.text import capital, ranks_text
from rankscope_server.observe.deviation import Deviation, deviation_of
from rankscope_server.observe.episodes import Episode, find_episodes, turning_point
from rankscope_server.observe.rank_cost import (
    Cost,
    Excess,
    calm_columns,
    cost_of,
    excess_of,
    healthy_columns,
    phase_excess,
)
from rankscope_server.observe.stack_samples import StackDifference, difference
from rankscope_server.observe.step_table import StepTable
from rankscope_server.replay.recorded_program import NoReplay
from rankscope_server.replay.replay_table import begin_of, usable_columns

Kind: TypeAlias = Literal["slow_compute", "slow_data"]
_MAX_FINDINGS = 32


class Straggler:
    """Finds ranks whose self time is longer than that of their peers, or than before."""

    name: ClassVar[str] = "straggler"
    finds: ClassVar[str] = (
        "Ranks whose self time is longer than that of their peers, or than before; of two or three "
        "in a role also one that the others have waited for since its first steps; most of a role "
        "that became slower together, with what they alone have in common"
    )
    needs: ClassVar[str] = (
        "steps of two or more ranks, over NCCL the phases that devices measured; samples of ranks, "
        "hosts and GPUs for the kind"
    )
    silent: ClassVar[str] = (
        "the job loses less than 1 %; so many ranks slow down at once that too few stay as they "
        "were to compare them with; the rank was given more work: info"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return the slow ranks of an attempt, those that recovered too."""
        window = as_devices_report(window)
        table, policy = window.steps, window.policy
        lack = lack_of(window)
        if lack is not None:
            few = _of_recording(window, [])
            return ran(self, few) if few else skipped(self, *lack)
        roles = roles_of(window)
        deviation = deviation_of(table, roles, policy)
        num_steps = table.num_steps + table.dropped_steps
        every = find_episodes(deviation, num_steps, policy)
        episodes = [episode for episode in every if _is_covered(table, episode, policy)]
        unknown = _not_known(
            table, deviation, [one for one in every if one not in episodes], policy
        )
        events, notes = without_global(events_of(episodes, deviation, policy), deviation, policy)
        cases = [
            case
            for event in events
            for alike in each_proved(table, event, policy)
            if (case := _case_of_split(window, deviation, alike, episodes)) is not None
        ]
        cases += _of_other_references(window, deviation, cases)
        cases.sort(key=lambda case: -case.cost.ratio)
        cases, unclear = _with_known_calls(window, cases)
        cases = [kept for case in cases[:_MAX_FINDINGS] if (kept := _replayed(window, case))]
        cases = [_explained(window, deviation, case) for case in cases]
        cases = in_turn(window, deviation, joined(window, cases), cases)
        cases = [_since_before(window, self.name, case) for case in cases]
        findings = _one_per_key([finding_of(window, case) for case in cases])
        findings = _with_memory(window, deviation, self.name, findings)
        findings = _of_recording(window, findings)
        return ran(self, findings, _equal(deviation, findings), "; ".join(notes), unknown + unclear)


def _of_other_references(window: Window, deviation: Deviation, cases: Sequence[Case]) -> list[Case]:
    """Return slow ranks that neither their peers nor their own steps before show, beside `cases`.

    A case that is info may be noise of a rank that waits: it takes nothing from the others.
    """
    proved = [case for case in cases if case.ended_step is None and case.severity != "info"]
    named = {window.steps.row_of[rank] for case in proved for rank in case.ranks}
    return [*slow_from_start(window, deviation, named), *slow_majority(window, deviation, named)]


def _of_recording(window: Window, findings: list[Finding]) -> list[Finding]:
    """Add what a recording shows of ranks that are slow in most of its steps.

    It is over: that a rank is slow for some seconds only says how long the recording is.
    """
    if not window.facts.is_recording:
        return findings
    named = {rank for finding in findings if finding.severity != "info" for rank in finding.ranks}
    added = [other for other in slow_in_most(window) if not named.intersection(other.ranks)]
    again = {rank for other in added for rank in other.ranks}
    return [*added, *(finding for finding in findings if not again.intersection(finding.ranks))]


def _is_covered(table: StepTable, episode: Episode, policy: Policy) -> bool:
    missing = np.isnan(
        table.get("own")[episode.row, episode.columns][table.seen()[episode.columns]]
    )
    return bool(len(missing)) and float(missing.mean()) <= policy.max_missing_share


def _not_known(
    table: StepTable, deviation: Deviation, uncovered: Sequence[Episode], policy: Policy
) -> list[str]:
    """Return of which ranks too little is known to say that they are not slow."""
    rows = {episode.row for episode in uncovered}
    usual = np.flatnonzero(~table.special() & table.seen())
    usual = usual[usual >= deviation.first_column][-policy.recent_steps :]
    apart = np.isnan(deviation.own.raw[:, usual])
    if len(usual) >= policy.min_steps:
        # Where all lack a reference it is early; else their peers or first steps are missing.
        lack = apart.mean(axis=1) > policy.max_missing_share
        is_early = lack.all() and len(usual) < policy.recent_steps
        rows |= set(np.flatnonzero(lack).tolist()) if not is_early else set()
    if not rows:
        return []
    ranks = sorted(table.ranks[row] for row in rows)
    return [f"{capital(ranks_text(ranks))} cannot be compared: too little is known of their steps"]


def _with_known_calls(window: Window, cases: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """Leave out ranks whose collectives are unknown while those of others are known.

    What looks like work may be waiting that was not seen.
    """
    kept, unknown = [], []
    for case in cases:
        blind = without_calls(window, case.ranks, case.columns)
        if blind and not window.steps.is_thinned()[:, case.columns].all():
            unknown.append(
                f"{capital(ranks_text(case.ranks))} may be slow since step {case.onset_step:,}, "
                f"but the collectives of {ranks_text(blind)} are not known, those of others are"
            )
        else:
            kept.append(case)
    return kept, unknown


def _case_of_split(
    window: Window, deviation: Deviation, event: list[Episode], episodes: Sequence[Episode]
) -> Case | None:
    """Return what an event amounts to; None below the least cost or without a phase to blame."""
    table, policy = window.steps, window.policy
    calm = calm_columns(table, episodes)
    excess = excess_of(table, deviation, max(event, key=lambda episode: episode.size), calm, policy)
    kind = _kind(excess, policy)
    slow = {episode.row for episode in (*event, *_company(event, episodes, policy))}
    if kind is None or is_outdone(table, deviation, max(event, key=lambda one: one.size), slow):
        return None
    event = [_sharpen(table, deviation, episode, excess, policy) for episode in event]
    columns = slice(min(s.first for s in event), max(s.last for s in event) + 1)
    near = near_rows(window, [episode.row for episode in event])
    cost = cost_of(table, deviation, event, columns, calm, near, policy)
    worst, is_shared = max(event, key=lambda episode: episode.size), False
    whole = middle(deviation.own.raw[worst.row, worst.columns])
    if not whole >= policy.whole_share * worst.size:
        return None  # longer in one phase and shorter in another: the rank is no slower
    company = [
        episode
        for episode in _company(event, episodes, policy)
        if _lately(deviation, episode.row, columns) >= np.log(policy.company_ratio)
    ]
    share = _share(deviation, event, company, columns)
    if share < 1.0 and excess.own_ms >= policy.company_ratio * excess.reference_ms:
        # Slow ranks hide behind each other: repaired alone, none of them gains much.
        together = [*event, *company]
        near = near_rows(window, [episode.row for episode in together])
        joint = cost_of(table, deviation, together, columns, calm, near, policy)
        is_shared = joint.sure * share > cost.sure
        if is_shared:
            cost = replace(joint, ratio=joint.ratio * share, sure=joint.sure * share)
    if not cost.sure >= policy.cost_silent_ratio:
        return None
    is_lasting, ratio = lasts(table, worst, policy), float(np.exp(whole))
    return Case(
        kind=kind,
        ranks=tuple(sorted(table.ranks[episode.row] for episode in event)),
        worst_rank=table.ranks[worst.row],
        episode=worst,
        columns=columns,
        onset_step=int(table.steps[columns.start]),
        is_throughout=window.facts.is_recording and columns.start <= deviation.first_column,
        ended_step=int(table.steps[columns.stop - 1]) if all(s.ended for s in event) else None,
        seconds=seconds_of(table, columns),
        is_lasting=is_lasting,
        has_peers=bool(deviation.peers[worst.row]),
        num_peers=sum(role == deviation.roles[worst.row] for role in deviation.roles) - 1,
        excess=excess,
        ratio=excess.ratio_or(ratio) if len(event) == 1 else ratio,
        ratios=_ratios(table, deviation, event),
        cost=cost,
        company={
            table.ranks[episode.row]: float(np.exp(-_lately(deviation, episode.row, columns)))
            for episode in company
        },
        share=share if is_shared else 1.0,
        severity=_severity(cost, is_lasting, policy),
    )


def _ratios(table: StepTable, deviation: Deviation, event: Sequence[Episode]) -> dict[int, float]:
    """Return by how much each rank of an event is slower."""
    sizes = {
        episode.row: middle(deviation.own.raw[episode.row, episode.columns]) for episode in event
    }
    return {table.ranks[row]: float(np.exp(size)) for row, size in sizes.items()}


def _share(
    deviation: Deviation, event: Sequence[Episode], company: Sequence[Episode], columns: slice
) -> float:
    """Return which part of what all these episodes cost together is that of an event."""

    def excess(episodes: Sequence[Episode]) -> float:
        rows = {episode.row for episode in episodes}
        return sum(max(0.0, float(np.expm1(_lately(deviation, row, columns)))) for row in rows)

    mine, theirs = excess(event), excess(company)
    return mine / (mine + theirs) if mine > 0 and theirs > 0 else 1.0


def _lately(deviation: Deviation, row: int, columns: slice) -> float:
    """Return by which logarithm a row is above its reference over these columns."""
    size = middle(deviation.own.raw[row, columns])
    return size if np.isfinite(size) else 0.0


def _sharpen(
    table: StepTable, deviation: Deviation, episode: Episode, excess: Excess, policy: Policy
) -> Episode:
    """Read the onset from the phase that holds most of the excess: the others only add noise."""
    phase = max(excess.by_phase, key=lambda name: excess.by_phase[name])
    begin = max(deviation.first_column, episode.first - policy.short_window)
    stop = min(episode.last, episode.first + policy.long_window) + 1
    raw = phase_excess(table, deviation, episode.row, phase, slice(begin, stop))
    calm = middle(raw[: episode.first - begin]) if episode.first > begin else 0.0
    size = middle(raw[episode.first - begin :])
    if not size > calm:
        return episode
    return replace(episode, first=begin + turning_point(raw, calm, size))


def _company(event: list[Episode], episodes: Sequence[Episode], policy: Policy) -> list[Episode]:
    """Return the episodes of other ranks that cover most of this one."""
    rows = {episode.row for episode in event}
    first, last = event[0].first, event[0].last
    return [
        other
        for other in episodes
        if other.row not in rows
        and min(last, other.last) - max(first, other.first) >= policy.company_share * (last - first)
    ]


def _kind(excess: Excess, policy: Policy) -> Kind | None:
    """Return the kind by the phase that holds the excess; None if no phase explains it."""
    explained = sum(max(value, 0.0) for value in excess.by_phase.values())
    if not excess.total_ms > 0:
        return None
    if not explained >= policy.min_explained_share * excess.total_ms:
        return None
    data = max(excess.by_phase["data"], 0.0)
    return "slow_data" if data > policy.kind_share * explained else "slow_compute"


def _replayed(window: Window, case: Case) -> Case | None:
    """Return the case with the cost by a replay; None if that is too small to report.

    The severity stays that of the smaller estimate: a replay knows what an excess costs, the
    comparison with the steps before knows whether the job became slower at all.
    """
    row_of = window.steps.row_of
    scales = {row_of[rank]: case.excess.scale for rank in case.ranks}
    if case.share < 1.0:
        scales |= {row_of[rank]: min(1.0, scale) for rank, scale in case.company.items()}
    found = replayed(window, scales, case.columns, case.cost.near_change)
    if found.ratio is None:
        return replace(case, cost_text=f"by the shortcut, as {found.text}")
    ratio = found.ratio * case.share
    if ratio < window.policy.cost_silent_ratio:
        return None
    cost = replace(case.cost, ratio=ratio, sure=min(case.cost.sure, ratio))
    return replace(
        case,
        cost=cost,
        cost_text=f"by {found.text}",
        severity=_severity(cost, case.is_lasting, window.policy),
    )


def _explained(window: Window, deviation: Deviation, case: Case) -> Case:
    """Return the case with its cause, where a second signal proves one."""
    row = case.episode.row
    role = deviation.roles[row]
    peers = [r for r, other in enumerate(deviation.roles) if other == role and r != row]
    calm = calm_columns(window.steps, [case.episode])
    suspect = Suspect(
        rank=case.worst_rank,
        row=row,
        columns=case.columns,
        peers=tuple(peers) if case.has_peers else (),
        healthy=healthy_columns(calm, case.columns.start, deviation.first_column, window.policy),
        excess=case.excess,
        ratio=case.ratio,
        is_data=case.kind == "slow_data",
        apart=_apart(window, case),
    )
    cause = cause_of(window, suspect)
    is_fault = cause is None or cause.kind != MORE_WORK
    severity = case.severity if is_fault else "info"
    return replace(case, cause=cause, severity=severity, apart=suspect.apart)


def _apart(window: Window, case: Case) -> tuple[int, StackDifference] | None:
    """Return where its worst rank is and one that is not slow is not, by stacks of both."""
    slow = {*case.ranks, *case.company}
    onset_ns = (window.time_ms(case.onset_step) or 0.0) * 1e6
    others = [rank for rank in window.steps.ranks if rank not in slow]
    return difference(window.stack_samples, case.worst_rank, others, onset_ns, window.policy)


def _severity(cost: Cost, is_lasting: bool, policy: Policy) -> Severity:
    """Return info for what is small, short (in steps and seconds) or not in every step."""
    return severity_of_cost(cost.sure, policy) if is_lasting else "info"


def _one_per_key(findings: list[Finding]) -> list[Finding]:
    """Keep one episode of the same ranks and kind: an open one, else the costliest."""
    kept: dict[str, Finding] = {}
    for finding in findings:  # costliest first
        known = kept.get(finding.key)
        if known is None or (known.state == "recovered" and finding.state == "open"):
            kept[finding.key] = finding
    return list(kept.values())


def _since_before(window: Window, name: str, case: Case) -> Case:
    """Return the case with the onset that was seen before the table moved on, if it was."""
    old = window.before.get(f"{window.attempt}/{name}/{name_of(case)}")
    onset = None if old is None else _forgotten_onset(window, old)
    if old is None or onset is None:
        return case
    if old.state != "open" and old.ended_step != case.ended_step:
        return case  # another time
    return replace(case, onset_step=onset, onset_ms=old.onset_ms)


def _forgotten_onset(window: Window, old: Finding) -> int | None:
    """Return with which step a finding began, if that is before the table's first one."""
    table, onset = window.steps, old.onset_step
    is_before = table.dropped_steps and onset is not None and onset < table.steps[0]
    return onset if is_before else None


def _with_memory(
    window: Window, deviation: Deviation, name: str, findings: list[Finding]
) -> list[Finding]:
    """Keep what the table has forgotten: a whole episode before its first column.

    It is over only where its ranks are no longer slow: without the steps before it may be that
    nothing is left to compare them with.
    """
    now = {finding.key: finding for finding in findings}
    named = {rank for finding in findings if finding.state == "open" for rank in finding.ranks}
    for key, old in window.before.items():
        if old.detector != name or key in now or _forgotten_onset(window, old) is None:
            continue
        if old.state == "open" and (
            named.intersection(old.ranks) or not _is_still_slow(window, deviation, old)
        ):
            first_step = int(window.steps.steps[0])
            now[key] = replace(old, state="recovered", ended_step=first_step)
        else:
            now[key] = old
    return list(now.values())


def _is_still_slow(window: Window, deviation: Deviation, old: Finding) -> bool:
    """Return whether the ranks work longer than the others now, or than in their first steps.

    Both in comparison with the ranks of their role that it does not name: all may have more to do.
    """
    table, policy = window.steps, window.policy
    rows = [table.row_of[rank] for rank in old.ranks if rank in table.row_of]
    roles = {deviation.roles[row] for row in rows}
    others = [row for row, role in enumerate(deviation.roles) if role in roles and row not in rows]
    if not rows or not others:
        return False
    head, own = table.head("own"), table.get("own")
    recent = np.flatnonzero(~table.special() & table.seen())[-policy.recent_steps :]
    first = np.where(table.head_special(), np.nan, head)[:, policy.warmup_max_steps :]
    now, then = median(own[:, recent].astype(float), 1), median(first.astype(float), 1)
    ratios = (middle(each[rows]) / middle(each[others]) for each in (now, now / then))
    return any(float(np.log(ratio)) > policy.ln_entry_floor for ratio in ratios)


def _equal(deviation: Deviation, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return what was compared and found equal, for the verdict of another detector."""
    if any(finding.state == "open" for finding in findings):
        return ()
    last = deviation.own.long[:, -1] if deviation.own.long.size else np.zeros(0)
    known = last[~np.isnan(last)]
    if not len(known):
        return ()
    spread = float(np.exp(np.max(np.abs(known))) - 1)
    return (
        f"self time per step: {len(known)} ranks within {100 * spread:.0f} % of their reference",
    )


@dataclass(frozen=True, slots=True)
class ReplayedCost:
    """The share of throughput that ranks take, or why there is no replay."""

    ratio: float | None
    text: str


def near_rows(window: Window, rows: Sequence[int]) -> list[int]:
    """Return the other rows of the step table whose ranks share a host with these."""
    table = window.steps
    hosts = set(window.hosts([table.ranks[row] for row in rows]))
    return [
        row
        for row, rank in enumerate(table.ranks)
        if row not in rows and window.host(rank) in hosts
    ]


def replayed(
    window: Window, scales: Mapping[int, float], columns: slice, near_change: float
) -> ReplayedCost:
    """Return what some rows of the step table cost in the last of these columns.

    `scales` says by row by what its work is multiplied where it has no peers. Without these rows
    the ranks of their hosts would work as long as before: 1 / `near_change` times.
    """
    policy, table = window.policy, window.steps
    size, stop = window.replays.block_size(table, policy), columns.stop
    if begin_of(table, stop, size) > columns.start:  # else every look would need another replay
        stop -= (stop + table.dropped_steps) % (size // 2)
    begin = max(columns.start, begin_of(table, stop, size))
    chosen = usable_columns(table, begin, stop, policy)
    try:
        replay, _ = window.replays.of(chosen, table, window.ranks, window.groups, policy)
    except NoReplay as error:
        return ReplayedCost(None, str(error))
    rows = list(scales)
    with_ms = replay.mean_step_ms()
    slower = dict.fromkeys([*rows, *near_rows(window, rows)], 1.0 / near_change)
    without_ms = replay.step_without_ms(rows, scales, slower)
    ratio = throughput_loss(with_ms, without_ms)
    return ReplayedCost(
        ratio,
        f"a replay of {len(replay.steps)} steps that gives back the recorded ones within "
        f"{100 * abs(replay.error_ratio()):.1f} %",
    )
