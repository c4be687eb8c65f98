"""Faults of a link: what the kernel did to the connections of a rank, and what followed."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.connections import (
    SO_ATTACH_FILTER,
    UNLIMITED,
    limit_rate,
    lose_arriving,
    lose_nothing,
    lost_segments,
)
from rankscope_trainer.faults.links import LinkFault, LossyLink, SlowLink, StoppedLink
from rankscope_trainer.settings import Settings
from tests.trainer.launch import launched

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="pacing and socket filters are Linux's"
)


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    other.settimeout(120)
    return one, other


@pytest.mark.needs("socket-filters")
def test_all_that_arrives_can_be_lost_and_comes_later() -> None:
    one, other = _pair()
    with one, other:
        lose_arriving(other, 1.0)
        one.sendall(b"lost")
        deadline = time.monotonic() + 60
        while lost_segments(other) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.recv(4)
        other.settimeout(120)
        lose_nothing(other)
        assert other.recv(4) == b"lost"  # TCP had it sent again


@pytest.mark.needs("socket-filters")
def test_part_of_what_arrives_can_be_lost() -> None:
    one, other = _pair()
    with one, other:
        lose_arriving(other, 0.5)
        for _ in range(30):
            one.sendall(b"x")
        received = 0
        while received < 30:
            received += len(other.recv(64))
        assert lost_segments(other) > 0
        lost = lost_segments(other)
        lose_nothing(other)
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        assert lost_segments(other) == lost
        lose_nothing(other)  # there is nothing to take away any more


def test_what_is_sent_can_be_paced() -> None:
    one, other = _pair()
    with one, other:
        limit_rate(one, 200_000)
        started = time.monotonic()
        threading.Thread(target=one.sendall, args=(bytes(2**20),), daemon=True).start()
        received = 0
        while received < 2**20:
            received += len(other.recv(65536))
        assert time.monotonic() - started > 1.0  # 5 s, less what the kernel sends at once
        limit_rate(one, UNLIMITED)


@pytest.mark.parametrize("fault", [LossyLink(), StoppedLink()], ids=lambda fault: fault.name)
def test_a_fault_that_needs_socket_filters_is_refused_where_they_are(
    fault: LinkFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket.setsockopt

    def refuse(self: socket.socket, level: int, option: int, value: Any) -> None:
        if option == SO_ATTACH_FILTER:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(self, level, option, value)

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    with pytest.raises(SettingError) as refused:
        fault.check(Settings(), 2)
    assert str(refused.value) == (
        f"setting `fault`: {fault.name} needs socket filters, which are refused here (Operation "
        "not permitted). Run as root or outside the sandbox, or leave it out."
    )
    SlowLink().check(Settings(), 2)  # it needs none


@pytest.mark.needs("socket-filters")
@pytest.mark.parametrize("fault", [LossyLink(), StoppedLink()], ids=lambda fault: fault.name)
def test_where_filters_are_allowed_it_is_not_refused(fault: LinkFault) -> None:
    fault.check(Settings(), 2)


@pytest.mark.multiproc
@pytest.mark.needs("socket-filters")
def test_links_of_a_rank_are_slow_then_lossy_then_dead(tmp_path: Path) -> None:
    faults = [
        "--fault", "slow_link:rank=1,peer=0,start=2,steps=3,size=0.1MiB/s",
        "--fault", "lossy_link:rank=1,start=6,steps=3,size=0.2",
        "--fault", "stopped_link:rank=1,start=11",
    ]  # fmt: skip
    finished = launched(tmp_path, 3, "--steps", "14", "--timeout-seconds", "10", *faults)
    assert finished.code == 1, finished.output
    assert max(finished.losses()) == 10  # no step ends any more
    assert "imed out" in finished.output
    lines = {(line["fault"], "fired" in line): line for line in finished.manifest()}
    slow, lossy, stopped = (
        (lines[name, False], lines[name, True])
        for name in ("slow_link", "lossy_link", "stopped_link")
    )
    assert [begin["start_step"] for begin, _ in (slow, lossy, stopped)] == [2, 6, 11]
    assert [end["end_step"] for _, end in (slow, lossy, stopped)] == [4, 8, 11]
    # With one of the two peers, or with both.
    assert 0 < slow[1]["connections"] < lossy[1]["connections"] == stopped[1]["connections"]
    # In gloo's ring rank 1 sends to rank 0, and of the gradients 0.35 MiB in each of three steps;
    # the kernel lets about the first 0.5 MiB go at once.
    seconds = (slow[1]["end_time_ns"] - slow[0]["start_time_ns"]) / 1e9
    assert seconds > 3
    assert lossy[1]["segments_lost"] > slow[1]["segments_lost"]
