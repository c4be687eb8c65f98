from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.node.processes.stacks import CALM_NS, Look, StackTaker, Taken, send_stack_signal
from rankscope.process.family import process_start_ticks

SECOND = 10**9
STUCK = Look(
    pid=1, start_ticks=2, stack_signal=39, ended=ring.RUNNING, heartbeat_ns=SECOND,
    oldest_open_ns=0, oldest_inside_ns=0,
)  # fmt: skip


class Rank:
    """A taker, a clock, and a rank that answers each signal with these stacks."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "stacks"
        self.answer = "File a.py line 1\n"
        self.sent: list[tuple[int, int, int]] = []
        self.now = 10 * SECOND
        self.taker = StackTaker(self.path, 0, self.send, int(2.5 * SECOND))

    def send(self, *what: int) -> bool:
        self.sent.append(what)
        with self.path.open("a") as file:
            file.write(self.answer)
        return True

    def run(self, look: Look, seconds: float, *, is_stuck: bool = True) -> list[Taken]:
        taken: list[Taken] = []
        for _ in range(int(seconds * 5)):
            self.now += SECOND // 5
            if (found := self.taker.turn(look, self.now, is_stuck)) is not None:
                taken.append(found)
        return taken


def test_three_per_incident_two_seconds_apart_equal_ones_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    (taken,) = rank.run(STUCK, 30)
    assert taken.text == "File a.py line 1"
    assert taken.reason.startswith("no sign of life for")
    assert rank.sent == [(1, 2, 39)] * 3
    moving = replace(STUCK, heartbeat_ns=rank.now + 10 * CALM_NS)
    assert not rank.run(moving, 70)
    rank.answer = "File b.py line 2\n"
    later = replace(STUCK, heartbeat_ns=rank.now)
    assert [taken.text for taken in rank.run(later, 4)] == ["File b.py line 2"]


def test_our_own_thread_is_left_out(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    ours = 'Thread 1:\n  File "/x/rankscope/rank/hooks/collectives/standing.py", line 9 in _run\n'
    rank.answer = f"{ours}\nCurrent thread 2:\n  File a.py line 1\n"
    (taken,) = rank.run(STUCK, 4)
    assert taken.text == "Current thread 2:\n  File a.py line 1"


def test_a_new_stack_is_only_the_new_part(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.run(STUCK, 1)
    rank.answer = "File c.py line 3\n"
    assert [taken.text for taken in rank.run(STUCK, 4)] == ["File c.py line 3"]


@pytest.mark.parametrize(
    "look",
    [
        replace(STUCK, stack_signal=0),
        replace(STUCK, ended=ring.CLEAN),
        replace(STUCK, heartbeat_ns=10**15),
        replace(STUCK, heartbeat_ns=0),
    ],
)
def test_no_signal(tmp_path: Path, look: Look) -> None:
    rank = Rank(tmp_path)
    assert not rank.run(look, 30)
    assert not rank.sent


def test_silence_alone_is_no_hang(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    assert not rank.run(STUCK, 30, is_stuck=False)
    inside = replace(STUCK, oldest_inside_ns=SECOND)
    (taken,) = rank.run(inside, 30, is_stuck=False)
    assert taken.reason.startswith("inside a collective for")


def test_a_rank_that_writes_nothing_is_not_awaited_for_ever(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.answer = ""
    assert not rank.run(STUCK, 30)
    assert len(rank.sent) == 3


SCRIPT = """
import faulthandler, os, signal, sys, time
if sys.argv[2] != "bare":
    faulthandler.register(39, file=open(sys.argv[1], "a"), all_threads=True, chain=False)
if sys.argv[2] == "exec":
    os.execv(sys.executable, [sys.executable, "-c", "print('up', flush=True)\\nwhile input() == '':"
                              " print('still up', flush=True)"])
print("up", flush=True)
while input() == "":
    print("still up", flush=True)
"""


def start(path: Path, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def answers(process: subprocess.Popen[str]) -> bool:
    """Whether it is up: a signal that was sent before is delivered before it reads on."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline() == "still up\n"


def test_a_real_process_writes_its_stacks(tmp_path: Path) -> None:
    process = start(tmp_path / "stacks", "handler")
    assert send_stack_signal(process.pid, process_start_ticks(process.pid), 39)
    deadline = time.monotonic() + 10
    while "most recent call first" not in (tmp_path / "stacks").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("kind", ["bare", "exec"])
def test_never_to_a_process_whose_default_action_would_kill_it(tmp_path: Path, kind: str) -> None:
    process = start(tmp_path / "stacks", kind)
    assert not send_stack_signal(process.pid, process_start_ticks(process.pid), 39)
    assert answers(process)
    process.kill()
    process.communicate()


def test_never_to_another_process_with_the_same_number(tmp_path: Path) -> None:
    process = start(tmp_path / "stacks", "handler")
    ticks = process_start_ticks(process.pid)
    assert not send_stack_signal(process.pid, ticks + 1, 39)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not send_stack_signal(process.pid, ticks, 39)
