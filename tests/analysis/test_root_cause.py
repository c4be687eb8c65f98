"""Crashes: the rank that failed first is named, echoes and teardown are not."""

from __future__ import annotations

import random

import msgspec
import pytest

from rankscope.wire import schema
from rankscope.wire.group_state import GroupState
from rankscope_server.analysis.state import RunState
from rankscope_server.observe import failures
from tests.analysis.failures import ECHOES, at, ended, look_after, raised, run
from tests.analysis.records import registered
from tests.analysis.simulator import CALM, MS, START_NS, Fault, Job, apply, record
from tests.analysis.watchdog import SIGNALS, gives_up

CAUSES = (
    ("ValueError", "cannot decode the batch of step 41: record ends after 17 of 65 bytes"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("OSError", "[Errno 28] No space left on device"),
    ("KeyError", "'optimizer'"),
    ("rankscope_trainer.faults.crash.FaultInjectedError", "rank 2 cannot decode the batch"),
)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_exception_is_the_cause_and_lost_connections_are_echoes(
    cause: tuple[str, str],
) -> None:
    for seed in range(6):
        chance = random.Random(seed)
        culprit = chance.randrange(8)
        records: list[schema.AnyRecord] = [raised(culprit, 0, *cause)]
        records.append(ended(culprit, 40, reason="exception", exit_code=1))
        for rank in set(range(8)) - {culprit}:
            if chance.random() < 0.6:
                records.append(raised(rank, chance.uniform(5, 900), *chance.choice(ECHOES)))
                records.append(ended(rank, 1000, reason="exception", exit_code=1))
            else:
                records.append(ended(rank, 1500, reason="signal", signal=15))
        look = look_after(run(8, num_hosts=2), records, seed)
        assert look.verdict is not None
        assert (look.verdict.kind, look.verdict.ranks) == ("crash", (culprit,)), seed
        assert cause[0] in look.verdict.what
        assert look.verdict.onset_step == 41
        assert look.verdict.confidence >= 0.9
        assert look.status == "failed"


def test_a_killed_rank_without_an_error_is_the_cause() -> None:
    records: list[schema.AnyRecord] = [
        ended(2, 0, reason="signal", signal=9, detail="out-of-memory event of the cgroup"),
        raised(0, 30, *ECHOES[0]),
        ended(0, 60, reason="exception", exit_code=1),
        ended(1, 400, reason="signal", signal=15),
        ended(3, 400, reason="signal", signal=15),
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (2,)
    assert "SIGKILL" in look.verdict.what
    assert "memory" in look.verdict.next
    assert set(look.verdict.victims) == {0, 1, 3}


def test_a_rank_that_leaves_without_a_word_is_not_outdone_by_what_others_die_of() -> None:
    """As recorded: `os._exit(3)`, two echoes, an abort at the end of Python, a forced kill."""
    records: list[schema.AnyRecord] = [
        ended(2, 0, reason="exit_code", exit_code=3),
        raised(1, 2.5, *ECHOES[0]),
        raised(3, 6, *ECHOES[0]),
        ended(1, 2_280, reason="exception", exit_code=1),
        ended(0, 2_300, reason="signal", signal=6),
        ended(3, 30_050, reason="signal", signal=9, detail="after an exception left the script"),
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (2,)
    assert "exited with code 3" in look.verdict.what
    assert "failed first, 2.5 ms before rank 1" in look.verdict.why
    assert "rank 0 failed after it" in look.verdict.why


def test_a_rank_that_is_killed_after_its_own_exception_was_not_killed_for_it() -> None:
    records: list[schema.AnyRecord] = [
        raised(1, 0, *ECHOES[0]),
        raised(3, 4, *ECHOES[0]),
        ended(1, 20, reason="exception", exit_code=1),
        ended(3, 30_000, reason="signal", signal=9),
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == ()
    assert "origin was not captured" in look.verdict.what


def test_an_exit_that_comes_with_an_abort_has_no_certain_order() -> None:
    records: list[schema.AnyRecord] = [
        ended(2, 0, reason="exit_code", exit_code=1),
        ended(0, 10, reason="signal", signal=11),
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (0,)


def test_a_crash_is_known_before_its_echoes_arrive() -> None:
    look = look_after(run(), [ended(3, 0, reason="signal", signal=11)])
    assert look.verdict is not None
    assert look.verdict.ranks == (3,)
    assert "SIGSEGV" in look.verdict.what


def test_who_is_found_later_takes_the_place_of_who_was_named_first() -> None:
    state = run()
    state.apply_record(ended(1, 300, reason="signal", signal=6))
    (first,) = [finding for finding in state.look(at(1_000)).findings if finding.kind == "crash"]
    state.apply_record(raised(2, 0, *CAUSES[0]))
    state.apply_record(ended(2, 10, reason="exit_code", exit_code=1))
    (second,) = [finding for finding in state.look(at(2_000)).findings if finding.kind == "crash"]
    assert (first.key, first.ranks, second.ranks) == (second.key, (1,), (2,))


def test_echo_seen_on_a_clock_that_runs_ahead_does_not_win() -> None:
    records: list[schema.AnyRecord] = [
        raised(1, 0, *CAUSES[0]),
        raised(6, -300, *ECHOES[0]),  # its host's clock is 0.3 s behind
    ]
    look = look_after(run(8, num_hosts=2), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (1,)


def test_two_causes_within_the_clock_band_are_both_named_with_a_hedge() -> None:
    state = RunState("run")  # without collectives nothing is known of the clocks
    for rank in range(8):
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=8, local_rank=rank % 2,
            local_world_size=2, node_rank=rank // 2, host=f"node-{rank // 2}", pid=rank + 1,
        ))  # fmt: skip
    for known, apart_ms in ((state, 200), (run(8, num_hosts=2), 10)):
        records: list[schema.AnyRecord] = [
            raised(1, 0, *CAUSES[0]), raised(6, apart_ms, *CAUSES[3]),
        ]  # fmt: skip
        look = look_after(known, records)
        assert look.verdict is not None
        assert look.verdict.ranks == (1, 6)
        assert look.verdict.confidence < 0.6


def test_known_clocks_tell_the_order_of_two_causes() -> None:
    for first, second in ((1, 6), (6, 1)):
        state = run(8, num_hosts=2)
        records: list[schema.AnyRecord] = [
            raised(first, 0, *CAUSES[0]), raised(second, 200, *CAUSES[3]),
        ]  # fmt: skip
        verdict = look_after(state, records).verdict
        assert verdict is not None
        assert verdict.ranks == (first,)


@pytest.mark.parametrize("ahead_ms", [3_000, -3_000])
@pytest.mark.parametrize("first", [1, 6])
def test_ends_are_ordered_on_one_clock(first: int, ahead_ms: int) -> None:
    """Ranks 4 to 7 are on a host whose clock was compared with the server's: 3 s apart."""
    state, second = RunState("run"), 7 - first
    for rank in range(8):
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=8, local_rank=rank % 4,
            local_world_size=4, node_rank=rank // 4, host=f"node-{rank // 4}", pid=rank + 1,
        ))  # fmt: skip
    for host, offset_ms in (("node-0", 0), ("node-1", -ahead_ms)):
        state.apply_record(schema.ClockOffset(
            attempt=0, rank=-1, time_ns=START_NS, offset_ns=offset_ms * MS, band_ns=MS, host=host,
        ))  # fmt: skip
    records: list[schema.AnyRecord] = []
    for rank, after_ms, cause in ((first, 0, CAUSES[4]), (second, 1_000, CAUSES[0])):
        own_ms = after_ms + (ahead_ms if rank >= 4 else 0)
        records.append(raised(rank, own_ms, *cause))
        records.append(ended(rank, own_ms + 200, reason="exception", exit_code=1))
    verdict = look_after(state, records).verdict
    assert verdict is not None
    assert verdict.ranks == (first,)
    assert verdict.why == (
        f"It failed first, 1.0 s before rank {second}; rank {second} failed after it"
    )


def test_an_order_by_clocks_that_were_not_compared_is_hedged() -> None:
    state = RunState("run")
    for rank in range(2):
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=2, local_rank=0,
            local_world_size=1, node_rank=rank, host=f"node-{rank}", pid=rank + 1,
        ))  # fmt: skip
    verdict = look_after(state, [raised(1, 0, *CAUSES[4]), raised(0, 2_000, *CAUSES[0])]).verdict
    assert verdict is not None
    assert (verdict.ranks, verdict.confidence) == ((1,), 0.6)
    assert "how far the clocks" in verdict.confidence_text


def test_a_later_cause_is_not_named() -> None:
    records: list[schema.AnyRecord] = [raised(1, 0, *CAUSES[0]), raised(6, 2000, *CAUSES[3])]
    look = look_after(run(8, num_hosts=2), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (1,)


def test_the_same_error_on_all_ranks_is_one_cause() -> None:
    records: list[schema.AnyRecord] = [
        raised(rank, 10.0 * rank, "ValueError", f"loss is nan on rank {rank}") for rank in range(4)
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (0, 1, 2, 3)


def test_only_echoes_hedge_and_name_nobody() -> None:
    records: list[schema.AnyRecord] = [raised(0, 0, *ECHOES[0]), raised(1, 10, *ECHOES[0])]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == ()
    assert look.verdict.confidence < 0.5
    assert "not captured" in look.verdict.what


def test_a_rank_that_left_early_is_named_with_a_hedge() -> None:
    records: list[schema.AnyRecord] = [
        ended(2, 0, reason="clean", exit_code=0),
        *(raised(rank, 100, *ECHOES[0]) for rank in (0, 1, 3)),
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (2,)
    assert 0.5 <= look.verdict.confidence < 0.85


@pytest.mark.parametrize("number", [2, 15])
def test_a_job_that_is_stopped_has_no_culprit(number: int) -> None:
    records: list[schema.AnyRecord] = [
        ended(rank, rank, reason="signal", signal=number) for rank in range(4)
    ]
    if number == 2:
        records += [raised(rank, 0, "KeyboardInterrupt", "") for rank in range(4)]
    look = look_after(run(), records)
    assert look.verdict is None
    assert [(f.severity, f.ranks) for f in look.findings] == [("info", ())]
    assert look.status == "ended"
    assert look.answer.state == "unknown"
    assert look.answer.text.startswith("Stopped from outside: 4 of 4 ranks: ")


def test_a_command_that_ends_its_ranks_and_succeeds_was_not_stopped_from_outside() -> None:
    """As a notebook: its kernel gets SIGTERM when all cells have run."""
    end = schema.Event(
        attempt=0, rank=schema.NODE_RANK, time_ns=at(500), name=schema.COMMAND_ENDED,
        fields={"exit_code": "0"},
    )  # fmt: skip
    stops = [ended(rank, rank, reason="signal", signal=15) for rank in range(4)]
    look = look_after(run(), [*stops, end])
    (finding,) = look.findings
    assert (finding.severity, look.status) == ("info", "ended")
    assert "stopped by its own command" in finding.what
    assert look.answer.state == "healthy"


def test_sigkill_on_all_ranks_is_a_stop_too() -> None:
    records: list[schema.AnyRecord] = [
        ended(rank, 20 * rank, reason="signal", signal=9) for rank in range(4)
    ]
    look = look_after(run(), records)
    assert look.verdict is None
    assert look.answer.text.startswith("Stopped from outside: 4 of 4 ranks: killed by SIGKILL")


def test_sigkill_after_the_launchers_sigterm_is_teardown() -> None:
    records: list[schema.AnyRecord] = [
        *(ended(rank, 5, reason="signal", signal=15) for rank in (0, 1, 3)),
        ended(2, 30_000, reason="signal", signal=9),
    ]
    assert look_after(run(), records).verdict is None


@pytest.mark.parametrize("late_ms", [20, 2_000])
def test_a_rank_that_is_killed_around_the_sigterm_of_the_others_was_killed_first(
    late_ms: int,
) -> None:
    records: list[schema.AnyRecord] = [
        *(ended(rank, rank, reason="signal", signal=15) for rank in (0, 1, 3)),
        ended(2, late_ms, reason="signal", signal=9),
    ]
    verdict = look_after(run(), records).verdict
    assert verdict is not None
    assert verdict.ranks == (2,)
    assert verdict.why.startswith("Rank 0 was stopped ")
    assert verdict.why.endswith(" earlier; ranks 0, 1 and 3 were stopped")


def test_a_clean_end_yields_nothing() -> None:
    records: list[schema.AnyRecord] = [
        ended(rank, rank, reason="clean", exit_code=0) for rank in range(4)
    ]
    look = look_after(run(), records)
    assert not look.findings
    assert look.status == "ended"
    assert look.answer.state == "healthy"


@pytest.mark.parametrize(
    ("code", "severity", "status"), [("0", "info", "ended"), ("", "warning", "failed"),
                                     ("1", "critical", "failed")]
)  # fmt: skip
def test_ranks_that_left_alike_under_a_command_that_succeeded(
    code: str, severity: str, status: str
) -> None:
    """Ray ends its workers with code 1 once it has what they reported."""
    node = {"attempt": 0, "rank": schema.NODE_RANK, "time_ns": at(500)}
    records: list[schema.AnyRecord] = [
        schema.RunStarted(**node, name="x", command="x", launcher="", world_size=4),
        *(ended(rank, rank, reason="exit_code", exit_code=1) for rank in range(4)),
    ]
    if code:
        fields = {"exit_code": code}
        records.append(schema.Event(**node, name=schema.COMMAND_ENDED, fields=fields))
    look = look_after(run(), list(records))
    (finding,) = look.findings
    assert (finding.severity, look.status) == (severity, status)
    one_less = [one for one in records if one.rank != 3]
    assert look_after(run(), one_less).findings[0].severity == "critical"


def at_collective(rank: int, issued: int, at_ns: int) -> schema.RankState:
    group = GroupState(group="world", issued=issued, ended=issued - (issued > 408))
    return schema.RankState(
        attempt=0, rank=rank, time_ns=at_ns, step=41, phase="backward", phase_since_ns=at_ns,
        heartbeat_ns=at_ns, groups=[group],
    )  # fmt: skip


def test_who_waited_for_another_did_not_begin_the_end_although_it_came_first() -> None:
    """Ray catches what one worker raises, and then ends all of them in any order."""
    records: list[schema.AnyRecord] = [
        *(ended(rank, 200 * (rank == 2), reason="exit_code", exit_code=1) for rank in range(4)),
        *(at_collective(rank, 408 if rank == 2 else 409, at(-10)) for rank in range(4)),
    ]
    (finding,) = look_after(run(), list(records)).findings
    assert (finding.ranks, finding.victims) == ((2,), (0, 1, 3))
    assert "waited for it" in finding.why
    records.append(schema.LogLine(
        attempt=0, rank=2, time_ns=at(-20), level=40, logger="ray",
        message="Error in training function:\nTraceback (most recent call last):\n  File ...\n"
        "ValueError: bad sample 17\n",
    ))  # fmt: skip
    (finding,) = look_after(run(), records).findings
    assert "after it logged ValueError: bad sample 17" in finding.what


def test_an_exception_in_a_thread_or_one_that_was_caught_ends_nothing() -> None:
    thread = schema.ErrorRaised(
        attempt=0, rank=1, time_ns=at(0), type="OSError", message="x", where="thread"
    )
    caught = schema.ErrorRaised(
        attempt=0, rank=2, time_ns=at(0), type="RuntimeError", message="y", where="collective"
    )
    assert not look_after(run(), [thread, caught]).findings


def test_an_exception_in_the_thread_that_trains_ends_the_training_of_its_rank() -> None:
    """The process may end cleanly all the same, if its main thread only joins that one."""
    error = schema.ErrorRaised(
        attempt=0, rank=1, time_ns=at(0), type="ValueError", message="bad", where="training",
        step=60,
    )  # fmt: skip
    ends = [ended(rank, 1_000, reason="clean", exit_code=0) for rank in range(4)]
    (finding,) = look_after(run(), [error, *ends]).findings
    assert (finding.kind, finding.ranks) == ("crash", (1,))
    went_on = msgspec.structs.replace(error, step=10)
    assert not look_after(run(), [went_on, *ends]).findings


@pytest.mark.parametrize("step", [0, 1])  # 1: of agents that say where a rank is
def test_an_error_before_training_is_in_no_step(step: int) -> None:
    error = schema.ErrorRaised(
        attempt=0, rank=1, time_ns=at(0), type="KeyError", message="'config'", step=step
    )
    (finding,) = look_after(RunState("run"), [error]).findings
    assert finding.what == "Rank 1 ended before its first step: KeyError: 'config'"
    assert finding.onset_step is None


def test_ranks_that_wait_for_a_dead_one_are_no_second_finding() -> None:
    recording = record(Job(steps=45, noise=CALM, faults=(Fault("hang", 2, 40),)))
    at_ms = recording.last_ms + 9000
    state = RunState("run")
    apply(state, recording.items())
    apply(state, recording.states(at_ms))
    state.apply_record(schema.RankEnded(
        attempt=0, rank=2, time_ns=recording.clock_ns(2, recording.last_ms + 100),
        reason="signal", signal=9, last_step=40,
    ))  # fmt: skip
    look = state.look(START_NS + int(at_ms * MS))
    assert [(f.kind, f.ranks) for f in look.findings] == [("crash", (2,))]


def test_a_hang_explains_the_time_outs_of_its_victims() -> None:
    recording = record(Job(steps=45, noise=CALM, faults=(Fault("hang", 2, 40),)))
    state = RunState("run")
    apply(state, recording.items())
    hung_ms = recording.last_ms
    for at_ms in (hung_ms + 6000, hung_ms + 7000):
        apply(state, recording.states(at_ms))
        state.look(START_NS + int(at_ms * MS))
    for rank in (0, 1, 3):
        now = recording.clock_ns(rank, hung_ms + 7500)
        state.apply_record(schema.ErrorRaised(
            attempt=0, rank=rank, time_ns=now, type=ECHOES[2][0], message=ECHOES[2][1], step=40
        ))  # fmt: skip
        state.apply_record(
            schema.RankEnded(attempt=0, rank=rank, time_ns=now, reason="exception", exit_code=1)
        )
    look = state.look(START_NS + int((hung_ms + 9000) * MS))
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("hang", (2,))
    assert [folded.key for folded in look.verdict.folded] == ["0/root-cause/end"]


@pytest.mark.parametrize("gave_up", [(0, 1, 3), (1,)], ids=["all who waited", "one of them"])
def test_who_gave_up_waiting_for_a_hung_rank_without_a_word_did_not_fail_first(
    gave_up: tuple[int, ...],
) -> None:
    recording = record(Job(steps=45, noise=CALM, faults=(Fault("hang", 2, 40),)))
    state = RunState("run")
    apply(state, recording.items())
    hung_ms = recording.last_ms
    for at_ms in (hung_ms + 6_000, hung_ms + 60_000):
        apply(state, recording.states(at_ms))
        state.look(START_NS + int(at_ms * MS))
    for rank in range(4):
        number, end_ms = (6, 60_500) if rank in gave_up else (15, 61_500)
        state.apply_record(schema.RankEnded(
            attempt=0, rank=rank, time_ns=recording.clock_ns(rank, hung_ms + end_ms + rank),
            reason="signal", signal=number, last_step=39,
        ))  # fmt: skip
    look = state.look(START_NS + int((hung_ms + 63_000) * MS))
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("hang", (2,))
    assert [folded.key for folded in look.verdict.folded] == ["0/root-cause/end"]
    assert look.status == "failed"
    assert look.status_text.startswith("stopped while stuck: Rank 2")


def test_after_a_restart_the_verdict_is_that_of_the_new_attempt() -> None:
    state = run()
    crash = look_after(state, [raised(1, 0, *CAUSES[0])]).verdict
    assert crash is not None
    for rank in range(4):
        state.apply_record(registered(rank, 4, attempt=1, time_ns=at(5000), pid=rank))
    look = state.look(at(11_000))
    assert look.attempt == 1
    assert look.verdict is not None  # until the new attempt has a step, the old one is the news
    assert look.verdict.key == crash.key
    assert look.status == "starting"


@pytest.mark.parametrize(("kind", "message"), ECHOES)
def test_echoes_are_told_from_causes(kind: str, message: str) -> None:
    assert failures.of_error(raised(0, 0, kind, message)).role == "cascade"


@pytest.mark.parametrize(("kind", "message"), CAUSES)
def test_causes_are_told_from_echoes(kind: str, message: str) -> None:
    assert failures.of_error(raised(0, 0, kind, message)).role == "initiating"


def test_a_watchdog_that_aborts_its_own_rank_accuses_nobody_else() -> None:
    """Rank 2 fails; the watchdogs of the others give up and abort them, one of them first."""
    watchdog = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=40, OpType=ALLREDUCE)"
    for first_to_die in (0, 2):
        records: list[schema.AnyRecord] = [
            raised(2, 500, *CAUSES[0]),
            ended(2, 510, reason="exit_code", exit_code=1),
        ]
        for rank in (0, 1, 3):
            begins = 100 * rank if first_to_die == 0 else 600 + 100 * rank
            error = raised(rank, begins, "DistBackendError", watchdog)
            fatal = raised(rank, begins + 20, "Aborted", "Fatal Python error: Aborted")
            records += [
                msgspec.structs.replace(error, where="collective"),
                msgspec.structs.replace(fatal, where="fatal_signal"),
                ended(rank, begins + 50, reason="signal", signal=6),
            ]
        look = look_after(run(), records, seed=first_to_die)
        (finding,) = [one for one in look.findings if one.kind == "crash"]
        assert finding.ranks == (2,)


@pytest.mark.parametrize("number", SIGNALS)
def test_who_gave_up_waiting_over_nccl_did_not_begin_it(number: int) -> None:
    """Rank 1 of two hung, in no collective; nobody looked meanwhile."""
    records = [*gives_up(0, at(0), 114, number), ended(1, 60_900, reason="signal", signal=15)]
    look = look_after(run(2), records)
    assert [rank for finding in look.findings for rank in finding.ranks] == []
    assert "the origin was not captured" in look.answer.text


def test_an_abort_that_nothing_explains_is_a_cause() -> None:
    records: list[schema.AnyRecord] = [
        msgspec.structs.replace(
            raised(1, 0, "Aborted", "Fatal Python error: Aborted"), where="fatal_signal"
        ),
        ended(1, 30, reason="signal", signal=6),
        raised(0, 60, *ECHOES[0]),
        ended(0, 90, reason="exit_code", exit_code=1),
    ]
    (finding,) = [one for one in look_after(run(), records).findings if one.kind == "crash"]
    assert finding.ranks == (1,)
