"""What rules say, what becomes of alerts, and quiet hours: pure, so drawn and tried by the many."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_server.alerts.changes import (
    CHANGE_PAUSE_NS,
    CLEAR_NS,
    OpenAlert,
    advance,
    clear_since,
)
from rankscope_server.alerts.evaluate import (
    AFTER_END_NS,
    Clear,
    Firing,
    Outcome,
    evaluate,
    gone,
)
from rankscope_server.alerts.quiet import QuietHours, check, is_quiet, waits_until_ns
from rankscope_server.alerts.rules import (
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
)
from rankscope_server.alerts.seen import (
    Seen,
    SeenCollector,
    SeenFinding,
    SeenLoss,
    SeenRank,
    SeenRun,
    SeenServer,
)
from rankscope_server.prices import Rate

S = 10**9
NOW = 1_790_000_000 * S


def finding(number: int = 7, **changes: Any) -> SeenFinding:
    values: dict[str, Any] = {
        "id": number, "kind": "slow_compute", "severity": "critical", "confidence": 0.9,
        "is_over": False, "is_explained": False, "opened_ns": NOW - 60 * S, "ranks": (2,),
        "what": "Rank 2 is slow", "why": "1.5x", "next": "look", "throughput_ratio": 0.2,
        "rank_hours_per_day": 40.0,
    }  # fmt: skip
    return SeenFinding(**values | changes)


def run(*findings: SeenFinding, ages_s: tuple[float, ...] = (1, 1, 1, 1), **more: Any) -> SeenRun:
    ranks = tuple(SeenRank(n, f"node-{n // 2}", NOW - int(age * S)) for n, age in enumerate(ages_s))
    values: dict[str, Any] = {
        "run_id": "r", "name": "llama", "step": 40, "stepped_ns": NOW, "ranks": ranks,
        "findings": findings,
    }  # fmt: skip
    return SeenRun(**values | more)


def seen(*runs: SeenRun, **more: Any) -> Seen:
    return Seen(now_ns=NOW, runs=runs, **more)


def outcome(when: Any, view: Seen, **more: Any) -> Outcome | None:
    found = evaluate(Rule(when=when, **more), view)
    assert len(found) <= 1
    return next(iter(found.values()), None)


def test_a_finding_fires_with_its_verdict_and_a_link() -> None:
    fired = outcome(OnFinding(), seen(run(finding())))
    assert isinstance(fired, Firing)
    assert (fired.what, fired.why, fired.next) == ("Rank 2 is slow", "1.5x", "look")
    assert fired.path == "runs/r/findings/7"
    assert (fired.run_id, fired.run_name, fired.severity) == ("r", "llama", "critical")


@pytest.mark.parametrize(
    ("when", "found"),
    [
        ({"kinds": ["hang"]}, {}),
        ({"min_severity": "critical"}, {"severity": "warning"}),
        ({"min_confidence": 0.95}, {}),
        ({}, {"severity": "info"}),
    ],
)
def test_what_a_rule_does_not_ask_for_is_clear(when: dict[str, Any], found: Any) -> None:
    assert isinstance(outcome(OnFinding(**when), seen(run(finding(**found)))), Clear)


def test_what_another_finding_explains_is_no_problem_of_its_own() -> None:
    found = outcome(OnFinding(), seen(run(finding(is_explained=True))))
    assert found == Clear("another finding explains it", is_recovery=False)


def test_what_was_found_in_a_run_that_ended_is_an_alert_for_a_while() -> None:
    ended = run(finding(opened_ns=NOW - 60 * S), status="ended")
    assert isinstance(outcome(OnFinding(), seen(ended)), Firing)
    ended = run(finding(opened_ns=NOW - AFTER_END_NS - S), status="ended")
    assert outcome(OnFinding(), seen(ended)) == gone("the run has ended")
    failed = replace(ended, status="failed")  # a person has to see why
    assert isinstance(outcome(OnFinding(), seen(failed)), Firing)


def test_a_finding_may_have_to_last() -> None:
    view = seen(run(finding(opened_ns=NOW - 10 * S)))
    assert outcome(OnFinding(lasts_seconds=11), view) is None  # not yet, and not over either
    assert isinstance(outcome(OnFinding(lasts_seconds=10), view), Firing)


@pytest.mark.parametrize(
    ("pattern", "tags", "is_meant"),
    [
        ("", {}, True), ("llama*", {}, True), ("r", {}, True), ("*gpt*", {}, False),
        ("", {"team": "v*"}, True), ("", {"team": "x*"}, False), ("", {"owner": "*"}, False),
        ("LLAMA", {}, False),
    ],
)  # fmt: skip
def test_rules_are_about_runs_by_name_id_and_tags(
    pattern: str, tags: dict[str, str], is_meant: bool
) -> None:
    view = seen(run(finding(), tags={"team": "vision"}))
    found = outcome(OnFinding(), view, runs=pattern, tags=tags)
    assert isinstance(found, Firing if is_meant else Clear)
    assert is_meant or not found.is_recovery  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pattern", "is_meant"), [("", True), ("vision", True), ("vis*", True), ("speech", False)]
)
def test_rules_are_about_runs_of_a_project(pattern: str, is_meant: bool) -> None:
    found = outcome(OnFinding(), seen(run(finding(), project="vision")), project=pattern)
    assert isinstance(found, Firing if is_meant else Clear)


def test_a_stall_is_a_run_that_reports_and_does_not_step() -> None:
    still = run(stepped_ns=NOW - 700 * S)
    assert isinstance(outcome(OnStall(seconds=600), seen(still)), Firing)
    assert isinstance(outcome(OnStall(seconds=800), seen(still)), Clear)
    assert isinstance(outcome(OnStall(seconds=800), seen(replace(still, status="stuck"))), Firing)
    over = outcome(OnStall(seconds=600), seen(replace(still, status="failed")))
    assert isinstance(over, Clear)
    assert not over.is_recovery


def test_what_is_not_known_is_neither_wrong_nor_over() -> None:
    still = run(stepped_ns=NOW - 700 * S)
    behind = SeenServer(behind_seconds=90)
    assert outcome(OnStall(seconds=600), seen(still, server=behind)) is None
    assert outcome(OnStall(seconds=600), seen(replace(still, status="silent"))) is None
    assert outcome(OnThroughput(), seen(run(finding()), server=behind)) is None
    assert outcome(OnDisk(), seen()) is None


@pytest.mark.parametrize(
    ("ages_s", "severity", "said"),
    [
        ((1, 99, 1, 1), "warning", "Rank 1 went silent in llama"),
        ((99, 99, 99, 99), "critical", "llama is silent: nothing of its 4 ranks"),
    ],
)
def test_silence_of_ranks_and_of_a_run(ages_s: tuple[float, ...], severity: str, said: str) -> None:
    fired = outcome(OnSilence(seconds=60), seen(run(ages_s=ages_s)))
    assert isinstance(fired, Firing)
    assert (fired.severity, fired.what) == (severity, said)
    whole = outcome(OnSilence(seconds=60, is_whole_run=True), seen(run(ages_s=ages_s)))
    assert isinstance(whole, Firing) == (severity == "critical")


def test_a_collector_that_went_silent_is_one_problem_with_its_ranks() -> None:
    nodes = (SeenCollector("node-0", NOW), SeenCollector("node-1", NOW - 99 * S))
    fired = outcome(OnSilence(seconds=60), seen(run(ages_s=(1, 1, 99, 99), collectors=nodes)))
    assert isinstance(fired, Firing)
    assert fired.what == "The collector of node-1 went silent in llama"
    assert "rankscope doctor" in fired.next
    restarted = (*nodes, SeenCollector("node-1", NOW))  # another process of the same node
    assert isinstance(outcome(OnSilence(seconds=60), seen(run(collectors=restarted))), Clear)


def test_a_server_that_could_not_hear_calls_no_rank_silent() -> None:
    view = seen(run(ages_s=(99, 99, 99, 99)), hearing_since_ns=NOW - 59 * S)
    assert outcome(OnSilence(seconds=60), view) is None
    assert isinstance(outcome(OnSilence(seconds=58), view), Firing)


def test_an_agent_that_reports_and_loses_is_not_well() -> None:
    lost = SeenLoss(records=1_200, batches=2, worst="most on node-1: 1,000 collectives, ring full")
    fired = outcome(OnLoss(records=1_202), seen(run(lost=lost)))
    assert isinstance(fired, Firing)
    assert fired.what == "Rankscope does not see all of llama"
    assert fired.why == (
        "1,200 records dropped by agents, 2 batches missing; most on node-1: 1,000 collectives, "
        "ring full"
    )
    assert isinstance(outcome(OnLoss(records=1_203), seen(run(lost=lost))), Clear)
    assert isinstance(outcome(OnLoss(), seen(run(lost=SeenLoss(refused=1)))), Firing)
    assert isinstance(outcome(OnLoss(), seen(run())), Clear)
    assert outcome(OnLoss(), seen(run(lost=lost, status="ended"))) == gone("the run is over: ended")


def test_lost_throughput_by_share_or_by_rank_hours() -> None:
    view = seen(run(finding()))
    fired = outcome(OnThroughput(share_ratio=0.2), view)
    assert isinstance(fired, Firing)
    assert fired.what == "llama loses 20 % of its throughput"
    assert fired.why == "Rank 2 is slow"
    assert isinstance(outcome(OnThroughput(share_ratio=0.21), view), Clear)
    fired = outcome(OnThroughput(share_ratio=0, rank_hours_per_day=40), view)
    assert isinstance(fired, Firing)
    assert fired.what == "llama loses 40 rank-hours a day"


def test_a_budget_in_money_or_in_rank_hours() -> None:
    view = seen(run(spent_rank_hours=100.0, rate=Rate(2.5, "EUR")))
    fired = outcome(OnBudget(money=250), view)
    assert isinstance(fired, Firing)
    assert fired.what == "llama has spent 250.00 EUR"
    assert fired.why == "the rule allows 250.00; 100.0 rank-hours"
    assert fired.path == "runs/r/cost"
    assert isinstance(outcome(OnBudget(money=251), view), Clear)
    fired = outcome(OnBudget(rank_hours=99), view)
    assert isinstance(fired, Firing)
    assert fired.what == "llama has spent 100.0 rank-hours"
    assert isinstance(outcome(OnBudget(rank_hours=101), view), Clear)


def test_what_is_not_known_in_money_passes_no_budget_and_keeps_none() -> None:
    assert outcome(OnBudget(money=1), seen(run(spent_rank_hours=100.0))) is None
    assert outcome(OnBudget(money=1, rank_hours=1), seen(run())) is None


@pytest.mark.parametrize(
    ("when", "bad", "good"),
    [
        (OnLag(seconds=60), {"behind_seconds": 61.0}, {"behind_seconds": 59.0}),
        (OnQueue(used_ratio=0.5), {"queue_ratio": 0.5}, {"queue_ratio": 0.4}),
        (OnDisk(free_bytes=10), {"disk_free_bytes": 9}, {"disk_free_bytes": 10}),
        (OnDisk(database_bytes=10), {"database_bytes": 10}, {"database_bytes": 9}),
        (
            OnDisk(free_bytes=2, database_bytes=10),
            {"disk_free_bytes": 3, "database_bytes": 10},
            {"disk_free_bytes": 3, "database_bytes": 9},
        ),
    ],
)
def test_the_server_itself(when: Any, bad: Any, good: Any) -> None:
    assert isinstance(outcome(when, seen(server=SeenServer(**bad))), Firing)
    assert isinstance(outcome(when, seen(server=SeenServer(**good))), Clear)


def test_every_kind_of_rule_is_read_back_as_it_was() -> None:
    for when in (
        OnFinding(),
        OnStall(),
        OnSilence(),
        OnThroughput(),
        OnLoss(),
        OnLag(),
        OnQueue(),
        OnDisk(),
    ):
        rule = Rule(when=when, runs="a*", tags={"x": "y"}, channels=[1])
        assert msgspec.json.decode(msgspec.json.encode(rule), type=Rule) == rule


# --- what becomes of an alert, over many looks

FIRING = Firing(severity="warning", what="w", why="y", next="n", path="p")
outcomes = st.one_of(
    st.none(),
    st.builds(
        replace, st.just(FIRING), severity=st.sampled_from(["critical", "warning", "info"]),
        facts=st.sampled_from([("1",), ("1", "2")]),
    ),
    st.builds(Clear, st.just("over"), st.booleans(), st.booleans()),
)  # fmt: skip


class Life:
    """Keeps one subject's alert as the watcher does."""

    def __init__(self) -> None:
        self.known: OpenAlert | None = None
        self.events: list[tuple[int, str]] = []

    def look(self, found: Outcome | None, now_ns: int) -> None:
        if self.known is not None:
            self.known = replace(self.known, clear_since_ns=clear_since(self.known, found, now_ns))
        change = advance(self.known, found, now_ns)
        if change is None:
            return
        self.events.append((now_ns, change.event))
        self.known = None
        if change.firing is not None:
            self.known = OpenAlert(
                id=1, severity=change.firing.severity, facts=change.firing.facts,
                notified_ns=now_ns,
            )  # fmt: skip


@given(st.lists(st.tuples(outcomes, st.integers(1, 200)), max_size=60))
def test_one_message_opens_and_one_ends_each_problem(looks: list[tuple[Any, int]]) -> None:
    life, now_ns = Life(), NOW
    for found, seconds in looks:
        now_ns += seconds * S
        life.look(found, now_ns)
    names = [event for _, event in life.events if event != "changed"]
    assert names[::2] == ["opened"] * len(names[::2])
    assert set(names[1::2]) <= {"recovered", "closed"}


@given(st.lists(st.tuples(outcomes, st.integers(1, 200)), min_size=1, max_size=60))
def test_it_ends_only_where_that_is_known(looks: list[tuple[Any, int]]) -> None:
    life, now_ns, clear_ns = Life(), NOW, 0
    for found, seconds in looks:
        now_ns += seconds * S
        if isinstance(found, Firing):
            clear_ns = 0
        elif isinstance(found, Clear):
            clear_ns = clear_ns or now_ns
        before = len(life.events)
        life.look(found, now_ns)
        for _, event in life.events[before:]:
            if event == "recovered":
                assert isinstance(found, Clear)
                assert found.is_recovery
            if event == "closed":
                assert isinstance(found, Clear)
                assert not found.is_recovery
            if event in ("recovered", "closed"):
                assert found.is_final or now_ns - clear_ns >= CLEAR_NS
        if found is None:
            assert len(life.events) == before


@given(st.lists(st.sampled_from([("1",), ("1", "2")]), min_size=2, max_size=200))
def test_updates_are_no_spam(facts: list[tuple[str, ...]]) -> None:
    life = Life()
    for second, some in enumerate(facts):
        life.look(replace(FIRING, facts=some), NOW + second * S)
    assert len(life.events) == 1  # all within the pause
    life.look(replace(FIRING, facts=("1", "2", "3")), NOW + CHANGE_PAUSE_NS)
    assert [event for _, event in life.events] == ["opened", "changed"]
    life.look(replace(FIRING, severity="critical"), NOW + CHANGE_PAUSE_NS + S)
    assert life.events[-1][1] == "changed"  # worse is said at once


def test_what_a_person_closed_says_nothing_more_and_opens_anew_afterwards() -> None:
    muted = OpenAlert(id=1, severity="warning", facts=(), notified_ns=0, is_muted=True)
    assert advance(muted, replace(FIRING, severity="critical"), NOW) is None
    assert advance(replace(muted, clear_since_ns=NOW), Clear("over"), NOW + S) is None
    over = advance(replace(muted, clear_since_ns=NOW), Clear("over"), NOW + CLEAR_NS)
    assert over is not None
    assert (over.event, over.is_silent) == ("recovered", True)


# --- quiet hours

NIGHT = QuietHours(start="22:00", end="07:00", zone="Europe/Berlin")


def at(text: str, zone: str = "Europe/Berlin", fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)


def until(quiet: QuietHours, moment: datetime, severity: str = "warning") -> datetime | None:
    found = waits_until_ns(quiet, severity, int(moment.timestamp()) * S)
    return datetime.fromtimestamp(found / S, UTC) if found else None


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        ("2026-07-01 21:59", None), ("2026-07-01 22:00", "2026-07-02 07:00"),
        ("2026-07-01 23:59", "2026-07-02 07:00"), ("2026-07-02 00:00", "2026-07-02 07:00"),
        ("2026-07-02 06:59", "2026-07-02 07:00"), ("2026-07-02 07:00", None),
        ("2026-03-28 23:00", "2026-03-29 07:00"),  # clocks go forward: an hour shorter
        ("2026-10-24 23:00", "2026-10-25 07:00"),  # and back: an hour longer
    ],
)  # fmt: skip
def test_quiet_hours_over_midnight(moment: str, end: str | None) -> None:
    assert until(NIGHT, at(moment)) == (at(end).astimezone(UTC) if end else None)


def test_nights_of_changed_clocks_are_as_long_as_they_are() -> None:
    spring = until(NIGHT, at("2026-03-28 22:00"))
    autumn = until(NIGHT, at("2026-10-24 22:00"))
    assert spring is not None
    assert autumn is not None
    assert spring - at("2026-03-28 22:00").astimezone(UTC) == timedelta(hours=8)
    assert autumn - at("2026-10-24 22:00").astimezone(UTC) == timedelta(hours=10)


def test_an_end_that_no_clock_shows_and_one_that_clocks_show_twice() -> None:
    gone = QuietHours(start="01:00", end="02:30", zone="Europe/Berlin")
    assert until(gone, at("2026-03-29 01:30")) == at("2026-03-29 03:00").astimezone(UTC)
    assert is_quiet(gone, at("2026-10-25 02:10", fold=1))
    second = at("2026-10-25 02:30", fold=1).astimezone(UTC)
    assert until(gone, at("2026-10-25 02:10", fold=1)) == second
    assert until(gone, at("2026-10-25 02:10")) == second - timedelta(hours=1)


@given(
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)), st.integers(0, 1439),
    st.integers(0, 1439), st.sampled_from(["Europe/Berlin", "UTC", "America/New_York",
                                           "Asia/Kolkata", "Australia/Lord_Howe"]),
)  # fmt: skip
def test_a_message_waits_to_the_first_minute_that_is_not_quiet(
    moment: datetime, start: int, end: int, zone: str
) -> None:
    moment = moment.replace(tzinfo=UTC, microsecond=0)
    start, end = start, (end if end != start else (end + 1) % 1440)
    quiet = QuietHours(
        start=f"{start // 60:02}:{start % 60:02}", end=f"{end // 60:02}:{end % 60:02}", zone=zone
    )
    check(quiet)
    last = until(quiet, moment)
    assert (last is not None) == is_quiet(quiet, moment)
    if last is not None:
        assert not is_quiet(quiet, last)
        assert is_quiet(quiet, last - timedelta(minutes=1)) or last - moment < timedelta(minutes=1)
        assert last - moment <= timedelta(hours=26)


def test_critical_ones_come_through_unless_none_may() -> None:
    night = at("2026-07-01 23:00")
    assert until(NIGHT, night, "critical") is None
    assert until(msgspec.structs.replace(NIGHT, lets_through="none"), night, "critical")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"zone": "Mars/Base"}, "quiet.zone: 'Mars/Base' is no time zone"),
     ({"zone": "../etc/passwd"}, "quiet.zone"), ({"end": "22:00"}, "quiet.end")],
)  # fmt: skip
def test_hours_that_cannot_be_are_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(msgspec.structs.replace(NIGHT, **changes))
