"""Ranks and collector in containers of their own: real pid and mount namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankscope.files.start_collector import collector_environment
from rankscope.wire import schema
from tests import capabilities
from tests.agent.collector import processes
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.processes import FAKE_RANK, wait_for
from tests.agent.collector.receiver import Receiver

BYSTANDER = "654321"  # seconds: nobody else sleeps so long


@pytest.fixture
def containers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes in namespaces of their own; they end with the test."""
    capabilities.need("containers")
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        processes.stop(process)


def contain(script: str, *words: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Run a shell script as the first process of a container."""
    command = [*capabilities.CONTAINER, "sh", "-c", script, "sh", *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)


def test_a_rank_in_another_container_is_followed_and_never_signalled(
    run: Path, receiver: Receiver, containers: list[subprocess.Popen[bytes]]
) -> None:
    environ = collector_environment(
        processes.environment(server=receiver.url, hang_stack_seconds=0.5)
    )
    # the rank is pid 2 in its container; pid 2 in the collector's is a bystander
    rank = contain(
        '"$@"; true', sys.executable, str(FAKE_RANK), str(run), "0", "400", "80", "stuck",
        environ=os.environ.copy(),
    )  # fmt: skip
    containers.append(rank)
    wait_for(lambda: list(run.glob("0/0.2/steps.ring")))
    time.sleep(1.0)  # no hook is called any more when the collector sees it first
    collector = contain(
        f'sleep {BYSTANDER} & "$@"', sys.executable, "-m", "rankscope.node", "--run-dir",
        str(run), environ=environ,
    )  # fmt: skip
    containers.append(collector)
    wait_for(lambda: [e for e in receiver.records(schema.Event) if e.name == "stacks skipped"])
    (event,) = [e for e in receiver.records(schema.Event) if e.name == "stacks skipped"]
    assert "another pid namespace" in event.fields["reason"]
    wait_for(lambda: len(receiver.rows("collectives", "sequence")) == 400)
    first = receiver.records(schema.RankState)[0].time_ns
    wait_for(lambda: receiver.records(schema.RankState)[-1].time_ns - first > 4e9)
    assert receiver.records(schema.RankState)[-1].alive
    assert not receiver.records(schema.RankEnded)
    assert not receiver.records(schema.Stacks)
    assert [child for child in _below(collector) if BYSTANDER in child.cmdline()]
    assert [child for child in _below(rank) if str(FAKE_RANK) in child.cmdline()]
    for child in _below(rank):
        child.kill()
    wait_for(lambda: receiver.records(schema.RankEnded))
    (ended,) = receiver.records(schema.RankEnded)
    assert ended.reason == "lost"
    assert ended.detail.endswith("(another pid namespace), and its files are no longer held")
    (run / "node" / "pid").unlink()  # a number of the container, not of ours


def _below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_a_clock_that_is_set_leaves_the_times_of_a_rank_in_order(
    run: Path, receiver: Receiver
) -> None:
    """Rings hold monotonic times and a (monotonic, wall) pair: a jump moves all, mixes none."""
    fake = FakeRank(run, 0)
    numbers = [fake.issue() for _ in range(5)]
    for number in numbers:
        fake.end(number)
    assert processes.ensure(run, server=receiver.url, flush_seconds=0.2)
    wait_for(lambda: len(receiver.rows("collectives", "arrived_ns")) == 5)
    before = time.time_ns()
    _set_pair(fake, wall_ns=before - 3600 * 10**9)  # the host's clock went back by an hour
    for _ in range(5):
        fake.end(fake.issue())
    wait_for(lambda: len(receiver.rows("collectives", "arrived_ns")) == 10)
    rows = sorted(receiver.rows("collectives", "sequence", "arrived_ns", "duration_ns"))
    times = [arrived for _, _, arrived, _ in rows]
    assert times[:5] == sorted(times[:5])
    assert times[5:] == sorted(times[5:])
    assert 3500 * 10**9 < before - times[5] < 3700 * 10**9
    assert all(0 <= duration < 10**9 for *_, duration in rows)


def _set_pair(fake: FakeRank, wall_ns: int) -> None:
    from rankscope.files.ring import _CLOCK, CLOCK_AT

    _CLOCK.pack_into(fake.ring.buffer, CLOCK_AT, 100, time.monotonic_ns(), wall_ns)
