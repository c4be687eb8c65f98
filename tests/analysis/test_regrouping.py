"""A job that regroups: the rank that it lost is named, no other is, and it has not failed."""

from __future__ import annotations

import itertools

from rankscope.wire import schema
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.regroups import Regroups
from rankscope_server.verdict.answers import Look
from tests.analysis.failures import at, ended, look_after, run
from tests.analysis.records import registered


def regrouped(epoch: int, ms: float, *ranks: int) -> list[schema.Event]:
    """Return what the members of a group record, each a little later than the one before."""
    fields = {"epoch": str(epoch), "ranks": ",".join(map(str, ranks))}
    return [
        schema.Event(
            attempt=0, rank=rank, time_ns=at(ms + place), name=schema.REGROUPED, step=41,
            fields=fields,
        )
        for place, rank in enumerate(ranks)
    ]  # fmt: skip


FIRST = regrouped(1, -50_000, 0, 1, 2, 3)
KILLED = ended(2, 0, reason="signal", signal=9)


def lost(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.kind == "lost_rank"]


def of_kind(look: Look, kind: str) -> list[tuple[int, ...]]:
    return [finding.ranks for finding in look.findings if finding.kind == kind]


def test_a_rank_that_was_outlived_is_named_and_the_run_goes_on() -> None:
    for seed in range(6):
        records = [KILLED, *FIRST, *regrouped(2, 300, 0, 1, 3)]
        look = look_after(run(), list(records), seed)
        (finding,) = lost(look)
        assert (finding.ranks, finding.victims, finding.severity) == ((2,), (), "warning")
        assert finding.what.endswith("was lost in step 41; ranks 0, 1 and 3 trained on without it")
        assert finding.why == "It was killed by SIGKILL"
        assert look.status == "running"
        assert not of_kind(look, "crash")


def test_without_a_new_group_it_is_a_crash_once_the_others_had_time() -> None:
    state = run()
    for record in [KILLED, *FIRST]:
        state.apply_record(record)
    soon, late = state.look(at(2_000)), state.look(at(100_000))
    assert not of_kind(soon, "crash")
    assert of_kind(late, "crash") == [(2,)]
    assert not lost(late)


def test_where_all_have_ended_nothing_is_waited_for() -> None:
    records = [KILLED, *FIRST, *(ended(rank, 900, reason="clean") for rank in (0, 1, 3))]
    look = look_after(run(), list(records))
    assert of_kind(look, "crash") == [(2,)]
    assert look.status == "failed"


def test_a_place_that_was_taken_is_no_more_than_a_note() -> None:
    came = registered(2, 4, time_ns=at(900))
    again = regrouped(3, 1000, 0, 1, 2, 3)
    look = look_after(run(), [KILLED, *FIRST, *regrouped(2, 300, 0, 1, 3), came, *again])
    (finding,) = lost(look)
    assert finding.severity == "info"
    assert finding.what.endswith("until a process took its place in step 41")
    assert look.status == "running"


def test_a_rank_that_was_left_out_alive_is_named_as_such() -> None:
    look = look_after(run(), [*FIRST, *regrouped(2, 300, 0, 1, 3)])
    (finding,) = lost(look)
    assert finding.ranks == (2,)
    assert finding.why == "Its process has not ended: it was too late for the others, or stopped"


def test_a_rank_that_was_lost_is_not_said_to_leave_updates_out() -> None:
    """Those that train on count their calls anew, and pass the number at which it ended."""

    def state(rank: int, step: int) -> schema.RankState:
        group = schema.GroupState(group="0", issued=60, ended=60)
        return schema.RankState(
            attempt=0, rank=rank, time_ns=at(1000), step=step, phase="forward",
            phase_since_ns=at(1000), heartbeat_ns=at(1000), groups=[group],
        )  # fmt: skip

    states = [state(rank, 41 if rank == 2 else 101) for rank in range(4)]
    alone = look_after(run(), list(states))
    assert of_kind(alone, "replica_drift") == [(2,)]
    look = look_after(run(), [KILLED, *FIRST, *regrouped(2, 300, 0, 1, 3), *states])
    assert not of_kind(look, "replica_drift")
    assert [finding.ranks for finding in lost(look)] == [(2,)]


def test_not_all_ranks_of_a_run_that_lost_one_ended_cleanly() -> None:
    ends = [ended(rank, 900, reason="clean") for rank in (0, 1, 3)]
    look = look_after(run(), [KILLED, *FIRST, *regrouped(2, 300, 0, 1, 3), *ends])
    assert (look.status, look.status_text) == ("ended", "3 of 4 ranks ended cleanly")


def test_the_order_of_events_does_not_matter() -> None:
    events = [*regrouped(1, 0, 0, 1), *regrouped(2, 5, 0)]
    tables = []
    for order in itertools.permutations(events):
        table = Regroups()
        for event in order:
            table.take(event)
        tables.append(table.by_epoch)
    assert all(table == tables[0] for table in tables)
    assert [group.ranks for group in table.in_order] == [(0, 1), (0,)]
    assert (table.are_without(1), table.are_without(0)) == (True, False)


def test_damaged_events_are_left_out() -> None:
    table = Regroups()
    for fields in ({}, {"epoch": "x", "ranks": "1"}, {"epoch": "1", "ranks": "1,,2"}):
        table.take(
            schema.Event(attempt=0, rank=0, time_ns=1, name=schema.REGROUPED, step=1, fields=fields)
        )
    assert not table.by_epoch
    assert not table.are_without(0)
