"""The Flight Recorder of real ranks on gloo: the door, the collector that reads, the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import is_nccl_available

from rankscope.files import flight_recorder as flight
from rankscope.files.run_directory import FLIGHT_SETUP, FLIGHT_SOCKET
from rankscope.rank.hooks.flight_recorder import plan
from rankscope.settings import Settings
from rankscope.wire import schema
from tests import fork_server
from tests.agent import recorded
from tests.agent.collector.processes import collector_pid, is_alive, stop, wait_for
from tests.agent.collector.receiver import Receiver

SCRIPT = str(recorded.SCRIPTS / "flight.py")
RANKS = 2
NAME = "flight-recorder"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()


def start(tmp_path: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    return subprocess.Popen(
        [sys.executable, *launch, SCRIPT, *arguments],
        env=recorded.environment(tmp_path, **fork_server.under_torchrun(), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def values(output: str) -> list[str]:
    """Return what the ranks computed, to the last bit."""
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def sources(records: list[schema.RankRegistered]) -> set[str]:
    """Return what the ranks said last of this hook."""
    return set({one.rank: one.sources[NAME] for one in records}.values())


@pytest.mark.multiproc
def test_ends_that_nobody_waited_for_come_from_the_flight_recorder(
    tmp_path: Path, receiver: Receiver
) -> None:
    with_it = start(
        tmp_path / "on", "work", "5",
        RANKSCOPE_FLIGHT_RECORDER="on", RANKSCOPE_SERVER=receiver.url, RANKSCOPE_COLLECTOR="1",
    )  # fmt: skip

    def doors() -> list[Path]:
        return list((tmp_path / "on").glob(f"*/*/*/{FLIGHT_SOCKET}"))

    wait_for(lambda: len(doors()) == RANKS, 60)
    for door in doors():
        assert door.parent.stat().st_mode & 0o777 == 0o700
    output, errors = with_it.communicate(timeout=120)
    assert with_it.returncode == 0, errors[-3000:]
    assert "rankscope:" not in errors
    wait_for(lambda: len(receiver.records(schema.RankEnded)) == RANKS)

    without = recorded.run(tmp_path / "off", "flight.py", "work", "0", ranks=RANKS,
                           RANKSCOPE_FLIGHT_RECORDER="off")  # fmt: skip
    assert values(output) == values(without.stdout)
    assert len(values(output)) == RANKS

    assert sources(receiver.records(schema.RankRegistered)) == {
        "read every 2 s, ends without times"
    }
    rows = receiver.rows("collectives", "operation", "state", "ended_by", "duration_ns")
    forgotten = [row for row in rows if row[1].startswith("reduce_scatter")]
    assert len(forgotten) == RANKS * 4
    assert {row[2:] for row in forgotten} == {(schema.ENDED, "flight recorder", -1)}
    others = [row for row in rows if row[1] == "all_reduce"]
    assert len(others) == RANKS * 40
    assert {row[3] for row in others} <= {"future", "wait", "probe"}  # their own sources
    assert not receiver.losses()
    assert not doors()
    assert not list((tmp_path / "on").glob(f"*/*/*/{FLIGHT_SETUP}"))


@pytest.mark.multiproc
def test_a_hang_is_told_by_the_flight_recorder_and_a_killed_rank_leaves_no_socket(
    tmp_path: Path, receiver: Receiver
) -> None:
    job = start(
        tmp_path, "hang",
        RANKSCOPE_FLIGHT_RECORDER="on", RANKSCOPE_SERVER=receiver.url, RANKSCOPE_COLLECTOR="1",
        RANKSCOPE_HANG_STACK_SECONDS="1.5",
    )  # fmt: skip

    def told() -> dict[int, dict[str, str]]:
        events = receiver.records(schema.Event)
        return {event.rank: event.fields for event in events if event.name == "flight recorder"}

    try:
        wait_for(lambda: len(told()) == RANKS, 60)
        fields = told()[0]
        assert fields["open"] == "1"
        assert fields["oldest open"].startswith("gloo:all_reduce in group 0 default_pg, number 3")
        assert "Float [[8]] -> [[8]]" in fields["oldest open"]
        assert any(name.startswith("group 0") for name in fields)
        assert told()[1]["open"] == "0"  # it answers, though its interpreter does not
        (directory,) = (tmp_path / "test" / "0").glob("0.*")
        assert (directory / fields["file"]).stat().st_size > 100
    finally:
        for path in (tmp_path / "test" / "0").iterdir():
            with contextlib.suppress(ProcessLookupError):  # torchrun ends the other one
                os.kill(int(path.name.split(".")[1]), signal.SIGKILL)
        job.communicate(timeout=60)
        stop(job)
    wait_for(lambda: not list(tmp_path.glob(f"*/*/*/{FLIGHT_SOCKET}")))
    wait_for(lambda: not is_alive(collector_pid(tmp_path / "test")))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("off", "skipped: RANKSCOPE_FLIGHT_RECORDER=off"),
        (
            "auto",
            "waits for a group of NCCL"
            if is_nccl_available()
            else "skipped: this PyTorch has no NCCL",
        ),
    ],
)
@pytest.mark.multiproc
def test_it_keeps_out_of_the_way_of_gloo(tmp_path: Path, mode: str, said: str) -> None:
    done = recorded.run(tmp_path, "flight.py", "work", "0", ranks=RANKS,
                        RANKSCOPE_FLIGHT_RECORDER=mode)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WorkerServer" not in done.stderr
    for rank in recorded.read(tmp_path):
        (source,) = sources(rank.of(schema.RankRegistered))
        assert source == said
        assert not (rank.directory / FLIGHT_SOCKET).exists()


BOTH = {flight.OF_NCCL, flight.OF_OTHERS}


@pytest.mark.parametrize(
    ("backend", "mode", "version", "environ", "polled", "timed", "said"),
    [
        ("nccl", "auto", (2, 15), {}, True, True, "with times of the device"),
        ("cpu:gloo,cuda:nccl", "auto", (2, 14), {}, True, True, "with times of the device"),
        ("nccl", "on", (2, 15), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, True, False, "overlap"),
        ("nccl", "auto", (2, 15), {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True, True, "device"),
        ("nccl", "auto", (2, 13), {}, False, False, "incidents only"),
        ("nccl", "on", (2, 6), {}, False, False, "incidents only"),  # no setting makes it safe
        ("gloo", "on", (2, 13), {}, True, False, "without times"),
    ],
)
def test_what_is_done_for_a_group(
    backend: str, mode: str, version: tuple[int, int], environ: dict[str, str],
    polled: bool, timed: bool, said: str,
) -> None:  # fmt: skip
    chosen = plan(backend, mode, BOTH, version, environ)
    assert chosen is not None
    assert (chosen.is_polled, chosen.is_timed) == (polled, timed)
    assert said in chosen.source
    assert chosen.is_endless == (polled and "nccl" in backend)


def test_nothing_is_done_for_a_group_that_it_does_not_know() -> None:
    assert plan("gloo", "auto", BOTH, (2, 15), {}) is None
    assert plan("nccl2", "auto", BOTH, (2, 15), {}) is None
    assert plan("nccl", "auto", {flight.OF_OTHERS}, (2, 13), {}) is None


def test_an_unknown_mode_is_told_at_once() -> None:
    from rankscope.rank.runtime import Agent

    with pytest.raises(ValueError, match="auto, on, off"):
        Agent(Settings(flight_recorder="yes"), {}).install_hooks()
    flight.check_mode("auto")
