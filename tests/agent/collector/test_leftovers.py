from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.files.start_collector import take_lock
from rankscope.node.ranks import leftovers
from rankscope.node.ranks.leftovers import DELIVERED, SERVER, Leftovers
from rankscope.node.ranks.rank import COLLECTED
from rankscope.settings import Settings
from rankscope.wire import schema
from tests.agent.collector import processes
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.processes import ensure, is_alive, start_rank, stop, wait_for
from tests.agent.collector.receiver import Receiver
from tests.agent.collector.spooled import is_spooled, spooled
from tests.ports import free_port


def test_a_run_that_nobody_delivered_is_delivered_by_the_next(tmp_path: Path) -> None:
    port = free_port()
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    rank = start_rank(crashed, 0, 200, 500)
    wait_for(lambda: list(crashed.glob("0/*/steps.ring")))
    assert ensure(crashed, server=f"http://127.0.0.1:{port}", flush_seconds=0.2)
    assert rank.wait(30) == 0
    stop(rank)
    wait_for(lambda: spooled(crashed))
    pid = processes.collector_pid(crashed)
    os.kill(pid, 9)  # and nobody starts it again
    wait_for(lambda: not is_alive(pid))
    receiver = Receiver(port)
    try:
        following = tmp_path / "next"
        following.mkdir()
        fake = FakeRank(following, 0)
        fake.say("of the next run")
        assert ensure(following, server=receiver.url)
        wait_for(lambda: (crashed / DELIVERED).exists())
        of_crashed = [b for b in receiver.batches.values() if b.run_id == "crashed"]
        rows = [chunk.count for b in of_crashed for chunk in b.chunks if chunk.kind == "steps"]
        assert sum(rows) == 20
        assert not spooled(crashed)
        assert any(b.run_id == "next" for b in receiver.batches.values())
        assert not (following / DELIVERED).exists()  # its rank lives
        pid = processes.collector_pid(following)
        assert is_alive(pid)
        os.kill(pid, 9)
    finally:
        receiver.close()


def test_a_run_of_another_server_stays_where_it_is(tmp_path: Path, receiver: Receiver) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    FakeRank(other, 0).say("not for you")
    (other / "node").mkdir()
    (other / SERVER).write_text("http://elsewhere")
    own.mkdir()
    settings = Settings(server=receiver.url)
    Leftovers(own, settings, processes.environment(server=receiver.url)).run()
    assert not (other / "node" / "pid").exists()
    assert receiver.num_posts == 0


def test_batches_for_one_server_are_never_sent_to_another(run: Path, receiver: Receiver) -> None:
    """A job's name may come again on another day, and with another server."""
    first_port = free_port()
    fake = FakeRank(run, 0)
    fake.say("for the first server")
    assert ensure(run, server=f"127.0.0.1:{first_port}", flush_seconds=0.2)
    wait_for(lambda: is_spooled(run, "for the first server"))
    kill(run)
    waiting = [path.read_bytes() for path in spooled(run)]

    fake.say("for the second server")
    assert ensure(run, server=receiver.url)
    wait_for(lambda: [e for e in receiver.records(schema.Event) if "another server" in e.name])
    wait_for(lambda: receiver.records(schema.LogLine))
    assert [line.message for line in receiver.records(schema.LogLine)] == ["for the second server"]
    assert leftovers.num_set_aside(run) >= len(waiting)
    assert "are for another server" in (run / "node" / "collector.log").read_text()
    kill(run)

    first = Receiver(first_port)  # it is back, spelled in another way
    try:
        assert ensure(run, server=f"{first.url}/")
        wait_for(lambda: first.records(schema.LogLine))
        assert [line.message for line in first.records(schema.LogLine)] == ["for the first server"]
        of_receiver = set(receiver.batches)
        assert not of_receiver & set(first.batches)
        kill(run)
    finally:
        first.close()


def kill(run: Path) -> None:
    os.kill(processes.collector_pid(run), 9)
    wait_for(lambda: not leftovers.is_held(run))


def test_of_several_runs_on_one_node_each_has_its_collector(
    tmp_path: Path, receiver: Receiver
) -> None:
    names = ("one", "two", "three")
    ranks = []
    for name in names:
        (tmp_path / name).mkdir()
        ranks.append(start_rank(tmp_path / name, 0, 300, 300))
        wait_for(lambda: list((tmp_path / name).glob("0/*/steps.ring")))  # noqa: B023
        assert ensure(tmp_path / name, server=receiver.url)
    for rank in ranks:
        assert rank.wait(30) == 0
        stop(rank)
    wait_for(lambda: all((tmp_path / name / DELIVERED).exists() for name in names))
    for name in names:
        batches = [b for b in receiver.batches.values() if b.run_id == name]
        assert sum(c.count for b in batches for c in b.chunks if c.kind == "collectives") == 300
        assert len({b.producer for b in batches}) == 1


class OldRun:
    """A run directory as a collector leaves it; its rank is a process that is gone."""

    def __init__(self, base: Path, name: str, *, hours_ago: float, pid: int = 0) -> None:
        self.path = base / name
        gone = subprocess.Popen(["/bin/true"])
        gone.wait()
        rank = FakeRank(self.path, 0, pid=pid or gone.pid)
        if not pid:
            ring.U64.pack_into(rank.ring.buffer, 40, 1)  # start ticks of nobody
        (rank.directory / COLLECTED).touch()
        (self.path / "node").mkdir()
        (self.path / DELIVERED).touch()
        then = time.time() - hours_ago * 3600
        os.utime(self.path / DELIVERED, (then, then))


def delete(base: Path, **settings: float) -> None:
    own = base / "own"
    own.mkdir(exist_ok=True)
    Leftovers(own, Settings(**settings), {}).run()  # type: ignore[arg-type]


def test_what_was_delivered_long_ago_goes(tmp_path: Path) -> None:
    old = OldRun(tmp_path, "old", hours_ago=30)
    recent = OldRun(tmp_path, "recent", hours_ago=20)
    waiting = OldRun(tmp_path, "waiting", hours_ago=30)
    (waiting.path / DELIVERED).unlink()
    (waiting.path / SERVER).write_text("http://127.0.0.1:1")
    delete(tmp_path)
    assert not old.path.exists()
    assert recent.path.exists()
    assert waiting.path.exists()  # the server has not got it


def test_the_oldest_go_when_they_are_too_large(tmp_path: Path) -> None:
    runs = [OldRun(tmp_path, f"run-{age}", hours_ago=age) for age in (3, 2, 1)]
    size = leftovers.size_of(runs[0].path)
    delete(tmp_path, keep_bytes=size * 2)
    assert [run.path.exists() for run in runs] == [False, True, True]


def test_runs_without_a_server_go_after_those_that_a_server_has(tmp_path: Path) -> None:
    local = [OldRun(tmp_path, f"local-{age}", hours_ago=age) for age in (900, 800)]
    for at, run in enumerate(local):
        (run.path / DELIVERED).unlink()
        next(run.path.glob("0/*/collected")).unlink()  # there was no server to read it for
        then = time.time() - (900 - at) * 3600
        os.utime(run.path, (then, then))
    sent = OldRun(tmp_path, "sent", hours_ago=1)
    size = leftovers.size_of(sent.path)
    delete(tmp_path, keep_bytes=size * 4)
    assert all(run.path.exists() for run in (*local, sent))  # however old
    delete(tmp_path, keep_bytes=size + size // 2)
    assert [run.path.exists() for run in (*local, sent)] == [False, True, False]


@pytest.mark.parametrize("why", ["process lives", "collector runs", "not read to its end"])
def test_a_run_that_is_in_use_stays(tmp_path: Path, why: str) -> None:
    run = OldRun(tmp_path, "run", hours_ago=99, pid=os.getpid() if why == "process lives" else 0)
    descriptor = take_lock(run.path) if why == "collector runs" else None
    if why == "not read to its end":
        next(run.path.glob("0/*/collected")).unlink()
    delete(tmp_path)
    assert run.path.exists()
    if descriptor is not None:
        os.close(descriptor)


def test_a_run_that_goes_on_is_no_longer_delivered(run: Path, receiver: Receiver) -> None:
    rank = start_rank(run, 0, 50, 500)
    assert rank.wait(30) == 0
    stop(rank)
    assert ensure(run, server=receiver.url)
    wait_for((run / DELIVERED).exists)
    wait_for(lambda: take_and_leave(run))
    second = FakeRank(run, 0, attempt=1)
    second.say("again")
    assert ensure(run, server=receiver.url)
    wait_for(lambda: len(receiver.records(schema.LogLine)) == 6)
    assert not (run / DELIVERED).exists()


def take_and_leave(run: Path) -> bool:
    descriptor = take_lock(run)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None
