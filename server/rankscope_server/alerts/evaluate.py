"""What a rule says about what is seen: which of its subjects fire, which are known to be fine.

Pure. A subject that is in neither group is not known, and its alert stays as it is: what is not
known is not over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

from rankscope_server.alerts.rules import (
    OF_SERVER,
    AnyWhen,
    OnBudget,
    OnDisk,
    OnFinding,
    OnLag,
    OnLoss,
    OnQueue,
    OnSilence,
    OnStall,
    OnThroughput,
    Rule,
    matches,
)
from rankscope_server.alerts.seen import Seen, SeenFinding, SeenRun
from rankscope_server.findings.finding import SEVERITIES, Severity
from rankscope_server.findings.text import percent_text
from rankscope_server.text import plural, rank_list

AFTER_END_NS = 600 * 10**9  # what was found at the end of a run is an alert for so long
STALE_SECONDS = 60.0  # what the analysis says of data that waits for longer is not news
_GIB = 1 << 30
_MOST_HOSTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """A subject of a rule that a person should know of: what, why, what to do next."""

    severity: Severity
    what: str
    why: str
    next: str
    path: str  # relative to the dashboard's root
    run_id: str = ""
    run_name: str = ""
    facts: tuple[str, ...] = ()  # a change of these is worth another message


@dataclass(frozen=True, slots=True)
class Clear:
    """A subject that is known not to fire.

    `is_recovery`: what was wrong is over. `is_final`: it cannot fire again a moment later.
    """

    why: str
    is_recovery: bool = True
    is_final: bool = False


def gone(why: str) -> Clear:
    """Return that a subject is no longer watched, whatever was wrong with it."""
    return Clear(why, is_recovery=False, is_final=True)


Outcome: TypeAlias = Firing | Clear
Outcomes: TypeAlias = Iterator[tuple[str, Outcome]]  # by subject


def evaluate(rule: Rule, seen: Seen) -> dict[str, Outcome]:
    """Return what a rule says of each subject that it knows something of."""
    when = rule.when
    if isinstance(when, OF_SERVER):
        return dict(_SERVER[type(when)](when, seen))
    found: dict[str, Outcome] = {}
    for run in seen.runs:
        outcomes = dict(_RUN[type(when)](when, run, seen))
        if not matches(rule, run):
            outcomes = dict.fromkeys(outcomes, gone("the rule is not about it"))
        found |= outcomes
    return found


def _findings(when: OnFinding, run: SeenRun, seen: Seen) -> Outcomes:
    for finding in run.findings:
        subject = f"finding/{finding.id}"
        if finding.is_over:
            yield subject, Clear("it is over")
        elif run.status == "ended" and seen.now_ns - finding.opened_ns > AFTER_END_NS:
            yield subject, gone("the run has ended")
        elif finding.is_explained:
            yield subject, Clear("another finding explains it", is_recovery=False)
        elif not _is_wanted(when, finding):
            yield subject, Clear("it is less than the rule asks for now")
        elif seen.now_ns - finding.opened_ns >= when.lasts_seconds * 1e9:
            yield subject, _of_finding(run, finding)


def _is_wanted(when: OnFinding, finding: SeenFinding) -> bool:
    return (
        (not when.kinds or finding.kind in when.kinds)
        and SEVERITIES.index(finding.severity) <= SEVERITIES.index(when.min_severity)
        and finding.confidence >= when.min_confidence
    )


def _of_finding(run: SeenRun, finding: SeenFinding) -> Firing:
    return Firing(
        severity=finding.severity, what=finding.what, why=finding.why, next=finding.next,
        path=run_path(run.run_id, "findings", str(finding.id)), run_id=run.run_id,
        run_name=run.name, facts=(finding.kind, ",".join(map(str, finding.ranks))),
    )  # fmt: skip


def _stall(when: OnStall, run: SeenRun, seen: Seen) -> Outcomes:
    subject = f"stall/{run.run_id}"
    if run.is_over:
        yield subject, gone(f"the run is over: {run.status}")
        return
    if not run.is_live or run.status == "silent" or seen.server.behind_seconds > STALE_SECONDS:
        return  # where it is now is not known
    still_s = (seen.now_ns - max(run.stepped_ns, seen.hearing_since_ns)) / 1e9
    if run.status != "stuck" and still_s < when.seconds:
        yield subject, Clear(f"it is at step {run.step:,}")
        return
    where = f"at step {run.step:,}" if run.step else "before its first step"
    yield subject, Firing(
        severity="critical",
        what=f"{_title(run)} has stalled {where}",
        why="its ranks wait for each other" if run.status == "stuck"
        else f"its ranks report, and no step has ended for {_span(still_s)}",
        next="see which rank the others wait for, and its stacks",
        path=run_path(run.run_id), run_id=run.run_id, run_name=run.name,
        facts=(str(run.step),) * (run.status == "stuck"),
    )  # fmt: skip


def _silence(when: OnSilence, run: SeenRun, seen: Seen) -> Outcomes:
    subject = f"silence/{run.run_id}"
    if run.is_over:
        yield subject, gone(f"the run is over: {run.status}")
        return
    before_ns = seen.now_ns - int(when.seconds * 1e9)
    if seen.hearing_since_ns > before_ns:
        return  # this server has not listened for long enough to call anything silent
    alive = [rank for rank in run.ranks if not rank.is_over]
    silent = [rank for rank in alive if rank.heard_ns < before_ns]
    hosts = _silent_hosts(run, before_ns)
    is_all = bool(alive) and len(silent) == len(alive)
    if not (silent or hosts) or (when.is_whole_run and not is_all):
        if alive:
            yield subject, Clear("its ranks report again")
        return
    since_s = when.seconds
    if is_all:
        since_s = (seen.now_ns - max(rank.heard_ns for rank in silent)) / 1e9
    yield subject, Firing(
        severity="critical" if is_all else "warning",
        what=_silence_text(run, [rank.rank for rank in silent], hosts, is_all=is_all),
        why=f"nothing was heard for {_span(since_s)} or longer, and no end was reported",
        next=_SILENCE_NEXT[bool(hosts)],
        path=run_path(run.run_id, "ranks"), run_id=run.run_id, run_name=run.name,
        facts=("all",) if is_all else (*hosts, *(str(rank.rank) for rank in silent)),
    )  # fmt: skip


_SILENCE_NEXT = {
    True: "see that the node is up and its collector runs (rankscope doctor there), and its route "
    "to this server",
    False: "see whether the process lives, and its last log lines",
}


def _silent_hosts(run: SeenRun, before_ns: int) -> list[str]:
    """Return the nodes whose collectors are silent and that have work left."""
    heard: dict[str, int] = {}
    for collector in run.collectors:
        heard[collector.host] = max(heard.get(collector.host, 0), collector.heard_ns)
    done = {rank.host for rank in run.ranks} - {r.host for r in run.ranks if not r.is_over}
    return sorted(host for host, ns in heard.items() if ns < before_ns and host not in done)


def _silence_text(run: SeenRun, ranks: list[int], hosts: list[str], *, is_all: bool) -> str:
    if is_all:
        return f"{_title(run)} is silent: nothing of its {plural(len(ranks), 'rank')}"
    if hosts:
        more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
        names = ", ".join(hosts[:_MOST_HOSTS]) + more
        return f"The collector of {names} went silent in {_title(run)}"
    return f"{rank_list(sorted(ranks)).capitalize()} went silent in {_title(run)}"


def _throughput(when: OnThroughput, run: SeenRun, seen: Seen) -> Outcomes:
    subject = f"throughput/{run.run_id}"
    if run.is_over:
        yield subject, gone(f"the run is over: {run.status}")
        return
    if not run.is_live or seen.server.behind_seconds > STALE_SECONDS:
        return
    now = [one for one in run.findings if not one.is_over and not one.is_explained]
    worst = max(now, key=lambda one: one.throughput_ratio or 0.0, default=None)
    longest = max(now, key=lambda one: one.rank_hours_per_day or 0.0, default=None)
    share, hours = _cost(worst, "throughput_ratio"), _cost(longest, "rank_hours_per_day")
    is_share = 0 < when.share_ratio <= share
    is_hours = 0 < when.rank_hours_per_day <= hours
    cause = worst if is_share else longest
    if cause is None or not (is_share or is_hours):
        yield subject, Clear("less is lost than the rule asks for")
        return
    lost = (
        f"{percent_text(share)} of its throughput" if is_share else f"{hours:,.0f} rank-hours a day"
    )
    yield subject, Firing(
        severity="warning", what=f"{_title(run)} loses {lost}", why=cause.what, next=cause.next,
        path=run_path(run.run_id, "findings", str(cause.id)), run_id=run.run_id,
        run_name=run.name, facts=(cause.kind,),
    )  # fmt: skip


def _loss(when: OnLoss, run: SeenRun, seen: Seen) -> Outcomes:
    subject, lost = f"loss/{run.run_id}", run.lost
    if run.is_over:
        yield subject, gone(f"the run is over: {run.status}")
        return
    if lost.total < when.records:
        yield subject, Clear("less is lost than the rule asks for")
        return
    parts = [
        f"{number:,} {text}" for number, text in (
            (lost.records, "records dropped by agents"), (lost.batches, "batches missing"),
            (lost.refused, "records refused"),
        ) if number
    ]  # fmt: skip
    yield subject, Firing(
        severity="warning", what=f"Rankscope does not see all of {_title(run)}",
        why="; ".join([", ".join(parts), *[lost.worst] * bool(lost.worst)]),
        next="see the page Agent of the run: what is recorded, what was lost, and why",
        path=run_path(run.run_id, "agent"), run_id=run.run_id, run_name=run.name,
    )  # fmt: skip


def _budget(when: OnBudget, run: SeenRun, seen: Seen) -> Outcomes:
    subject = f"budget/{run.run_id}"
    if run.is_over:
        yield subject, gone(f"the run is over: {run.status}")
        return
    hours, rate = run.spent_rank_hours, run.rate
    if hours is None:
        return
    money = None if rate is None else hours * rate.per_rank_hour
    is_money = money is not None and 0 < when.money <= money
    is_hours = 0 < when.rank_hours <= hours
    if not (is_money or is_hours):
        if when.rank_hours or money is not None:  # else what it spent is not known in money
            yield subject, Clear("less is spent than the rule allows")
        return
    amounts = [f"{hours:,.1f} rank-hours"]
    if rate is not None and money is not None:
        amounts.insert(0 if is_money else 1, rate.text(money))
    limit = f"{when.money:,.2f}" if is_money else f"{when.rank_hours:,.1f} rank-hours"
    yield subject, Firing(
        severity="warning", what=f"{_title(run)} has spent {amounts[0]}",
        why="; ".join([f"the rule allows {limit}", *amounts[1:]]),
        next="see where its time went, and whether it is to go on",
        path=run_path(run.run_id, "cost"), run_id=run.run_id, run_name=run.name,
    )  # fmt: skip


def _cost(finding: SeenFinding | None, name: str) -> float:
    return 0.0 if finding is None else float(getattr(finding, name) or 0.0)


def _lag(when: OnLag, seen: Seen) -> Outcomes:
    behind_s = seen.server.behind_seconds
    if behind_s < when.seconds:
        yield "server/lag", Clear("the server has caught up")
        return
    yield "server/lag", Firing(
        severity="critical", what=f"Rankscope is behind by {_span(behind_s)}",
        why="what ranks send waits to be stored or looked at: findings are late, and runs are not "
        "watched now",
        next="see its log, its processor and its disk; nothing is lost yet", path="alerts",
    )  # fmt: skip


def _queue(when: OnQueue, seen: Seen) -> Outcomes:
    used = seen.server.queue_ratio
    if used < when.used_ratio:
        yield "server/queue", Clear("the queue is short again")
        return
    yield "server/queue", Firing(
        severity="warning",
        what=f"The queue of Rankscope's store is {percent_text(used)} full",
        why="batches come faster than they are stored; beyond, senders are asked to wait",
        next="see the disk of the store, and how many ranks send to this server", path="alerts",
    )  # fmt: skip


def _disk(when: OnDisk, seen: Seen) -> Outcomes:
    free, size = seen.server.disk_free_bytes, seen.server.database_bytes
    if free is not None and free < when.free_bytes:
        what = f"The disk of Rankscope's store has {free / _GIB:,.1f} GiB free"
        why = f"that is less than {when.free_bytes / _GIB:,.1f} GiB; a full disk takes no batch"
    elif size is not None and 0 < when.database_bytes <= size:
        what = f"Rankscope's database has {size / _GIB:,.1f} GiB"
        why = f"the rule allows {when.database_bytes / _GIB:,.1f} GiB"
    else:
        if free is not None or (size is not None and when.database_bytes):
            yield "server/disk", Clear("there is as much room as the rule asks for")
        return
    yield "server/disk", Firing(
        severity="critical", what=what, why=why,
        next="delete runs that are not needed, or give the store more room", path="alerts",
    )  # fmt: skip


_RUN: dict[type[AnyWhen], Callable[[Any, SeenRun, Seen], Outcomes]] = {
    OnFinding: _findings,
    OnStall: _stall,
    OnSilence: _silence,
    OnThroughput: _throughput,
    OnLoss: _loss,
    OnBudget: _budget,
}
_SERVER: dict[type[AnyWhen], Callable[[Any, Seen], Outcomes]] = {
    OnLag: _lag,
    OnQueue: _queue,
    OnDisk: _disk,
}


def run_path(run_id: str, *parts: str) -> str:
    """Return the path of a page of a run, relative to the dashboard's root."""
    return "/".join(["runs", quote(run_id, safe=""), *parts])


def _title(run: SeenRun) -> str:
    return run.name or run.run_id


def _span(seconds: float) -> str:
    """Return a length of time in whole units."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"
