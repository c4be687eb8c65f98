"""Real rank processes, a real collector, a real receiver."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rankscope.files import journal
from rankscope.wire import schema
from tests.agent.collector import processes
from tests.agent.collector.complete import assert_complete
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.processes import ensure, is_alive, start_rank, stop, wait_for
from tests.agent.collector.receiver import Receiver


def test_everything_arrives_once_and_the_collector_ends(run: Path, receiver: Receiver) -> None:
    ranks = [start_rank(run, rank, 500, 500) for rank in range(2)]
    wait_for(lambda: len(list(run.glob("0/*/steps.ring"))) == 2)
    assert ensure(run, server=receiver.url, token="secret")
    for rank in ranks:
        assert rank.wait(30) == 0
        stop(rank)
    wait_for(lambda: len(receiver.records(schema.RankEnded)) == 2)
    assert_complete(receiver, 2, 500)
    assert receiver.headers["Authorization"] == "Bearer secret"
    for ended in receiver.records(schema.RankEnded):
        assert (ended.reason, ended.last_step) == ("clean", 51)
    last = {state.rank: state for state in receiver.records(schema.RankState)}
    for state in last.values():
        assert not state.alive
        assert [(g.group, g.issued, g.ended) for g in state.groups] == [("0", 500, 500)]
        assert state.groups[0].operation == "all_reduce"
        assert state.groups[0].call_site == "train.py:12 train"
    assert receiver.rows("host", "time_ns", "cpu_user_us_total")
    wait_for(lambda: not is_alive(processes.collector_pid(run)))
    assert not list((run / "node" / "spool").iterdir())
    assert all((path / "collected").exists() for path in run.glob("0/*"))
    assert not ensure_log(run)


def ensure_log(run: Path) -> list[str]:
    """Return what the collector said."""
    return (run / "node" / "collector.log").read_text().splitlines()


def test_killed_every_second_nothing_is_lost_and_nothing_comes_twice(
    run: Path, receiver: Receiver
) -> None:
    count = 2500
    ranks = [start_rank(run, rank, count, 250) for rank in range(2)]
    wait_for(lambda: len(list(run.glob("0/*/steps.ring"))) == 2)
    kills = 0
    receiver.drop_answers = 3
    while any(rank.poll() is None for rank in ranks):
        ensure(run, server=receiver.url, flush_seconds=0.2)
        time.sleep(1.0)
        if (run / "node" / "pid").exists() and is_alive(processes.collector_pid(run)):
            os.kill(processes.collector_pid(run), signal.SIGKILL)
            kills += 1
    for rank in ranks:
        stop(rank)
    assert kills >= 3  # on a loaded machine a life takes seconds to begin
    wait_for(lambda: ensure(run, server=receiver.url))  # as soon as the killed one is gone
    wait_for(lambda: len(receiver.records(schema.RankEnded)) >= 2)
    assert_complete(receiver, 2, count)
    assert len(receiver.records(schema.RankEnded)) == 2
    assert len({producer for producer, _ in receiver.batches}) == 1
    numbers = sorted(sequence for _, sequence in receiver.batches)
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_killed_rank_is_told_with_its_last_words(run: Path, receiver: Receiver) -> None:
    rank = start_rank(run, 0, 100, 1000, "unfinished")
    assert rank.stdout is not None
    rank.stdout.readline()
    assert ensure(run, server=receiver.url)
    wait_for(lambda: receiver.records(schema.RankState))
    killed = time.time()
    rank.kill()
    wait_for(lambda: receiver.records(schema.RankEnded))
    (ended,) = receiver.records(schema.RankEnded)
    assert (ended.reason, ended.signal, ended.exit_code) == ("signal", 9, None)
    assert "SIGKILL" in ended.detail
    states = receiver.rows("collectives", "sequence", "state", "duration_ns")
    assert states[-1] == (0, 101, schema.ISSUED, -1)
    assert sorted(line.message for line in receiver.records(schema.LogLine))[-1] == "rank 0 line 9"
    assert max(receiver.arrived.values()) - killed < 5
    stop(rank)


@pytest.mark.parametrize(
    ("end", "reason", "code"),
    [("exception", "exception", 1), ("code3", "exit_code", 3), ("kill", "signal", None)],
)
def test_the_reason_of_an_end(
    run: Path, receiver: Receiver, end: str, reason: str, code: int | None
) -> None:
    (run / "0").mkdir()
    assert ensure(run, server=receiver.url)
    wait_for(lambda: receiver.batches)
    rank = start_rank(run, 0, 300, 300, end)
    wait_for(lambda: receiver.records(schema.RankEnded))
    (ended,) = receiver.records(schema.RankEnded)
    assert (ended.reason, ended.exit_code) == (reason, code)
    stop(rank)


def test_a_segmentation_fault_is_told_with_its_stack(run: Path, receiver: Receiver) -> None:
    assert ensure(run, server=receiver.url)
    rank = start_rank(run, 0, 300, 300, "crash")
    wait_for(lambda: receiver.records(schema.RankEnded))
    (ended,) = receiver.records(schema.RankEnded)
    assert (ended.reason, ended.signal) == ("signal", signal.SIGSEGV)
    (error,) = receiver.records(schema.ErrorRaised)
    assert (error.type, error.where) == ("Segmentation fault", "fatal_signal")
    assert error.time_ns <= ended.time_ns  # when it was written, not when it was read
    assert "fake_rank.py" in error.traceback
    stop(rank)


def test_a_stuck_rank_shows_its_stacks_and_lives(run: Path, receiver: Receiver) -> None:
    rank = start_rank(run, 0, 10, 1000, "stuck")
    assert ensure(run, server=receiver.url, hang_stack_seconds=0.5)
    wait_for(lambda: receiver.records(schema.Stacks))
    (stacks,) = receiver.records(schema.Stacks)
    assert "fake_rank.py" in stacks.text
    assert "inside a collective for" in stacks.reason
    states = receiver.records(schema.RankState)
    assert (states[-1].groups[0].issued, states[-1].groups[0].ended) == (11, 10)
    assert rank.poll() is None
    stop(rank)


def test_a_new_attempt_is_taken_up(run: Path, receiver: Receiver) -> None:
    stop_first = start_rank(run, 0, 50, 500)
    wait_for(lambda: list(run.glob("0/*/steps.ring")))
    assert ensure(run, server=receiver.url)
    assert stop_first.wait(30) == 0
    stop(stop_first)
    second = FakeRank(run, 0, attempt=1)
    number = second.issue(sequence=777)
    second.say("second attempt")
    second.end(number)
    wait_for(lambda: any(line.attempt == 1 for line in receiver.records(schema.LogLine)))
    wait_for(lambda: (0, 777) in receiver.rows("collectives", "sequence"))
    assert is_alive(processes.collector_pid(run))  # this process, its rank, still lives


def test_journal_segments_that_are_sent_are_deleted(run: Path, receiver: Receiver) -> None:
    fake = FakeRank(run, 0)
    for segment in range(1, 4):
        (fake.directory / f"journal.{segment}").write_bytes(
            (fake.directory / "journal.0").read_bytes()
        )
    assert ensure(run, server=receiver.url)
    wait_for(lambda: [number for number, _ in journal.segments(fake.directory)] == [3])
    os.kill(processes.collector_pid(run), signal.SIGKILL)
    fake.end(fake.issue())  # named by a frame whose segment is gone
    wait_for(lambda: ensure(run, server=receiver.url))
    wait_for(lambda: receiver.rows("collectives", "group"))
    assert receiver.rows("collectives", "group", "call_site") == [(0, "0", "train.py:12 train")]


def test_sigterm_drains_and_ends(run: Path, receiver: Receiver) -> None:
    fake = FakeRank(run, 0)
    assert ensure(run, server=receiver.url, flush_seconds=30)
    wait_for(lambda: receiver.records(schema.RankState))
    fake.say("just before")
    pid = processes.collector_pid(run)
    os.kill(pid, signal.SIGTERM)
    assert wait_for(lambda: not is_alive(pid)) < 5
    assert [line.message for line in receiver.records(schema.LogLine)] == ["just before"]


def _watches_a_process(pid: int) -> bool:
    """Whether a process holds the pidfd of another one."""
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "pidfd" in os.readlink(opened):
                return True
    return False


def test_without_a_server_the_files_stay_and_the_watch_goes_on(run: Path) -> None:
    rank = start_rank(run, 0, 100, 1000, "wait")
    assert ensure(run)
    wait_for(lambda: (run / "node" / "pid").exists() and list(run.glob("0/*/steps.ring")))
    collector = psutil.Process(processes.collector_pid(run))
    wait_for(lambda: _watches_a_process(collector.pid))
    turns = collector.num_ctx_switches().voluntary  # it waits once in each
    wait_for(lambda: collector.num_ctx_switches().voluntary >= turns + 8)
    stop(rank)
    own = run / "node" / "collector"
    wait_for(lambda: own.exists() and b"rank_end" in (own / "journal.0").read_bytes())
    bodies = [body for _, body, _ in journal.read_frames(own / "journal.0", 0)]
    ended = [r for r in map(schema.decode_record, bodies) if isinstance(r, schema.RankEnded)]
    assert [record.signal for record in ended] == [9]
    (directory,) = run.glob("0/*")
    assert len(list(journal.read_frames(directory / "journal.0", 0))) == 12
    assert not (run / "node" / "spool").exists()
    wait_for(lambda: not is_alive(processes.collector_pid(run)))
