from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.node.processes import exits
from rankscope.node.processes.exits import ExitStatus, ExitStatuses, OomWatch, reason_of
from rankscope.node.processes.liveness import PIDFD_OPEN, Death, DeathWatch
from rankscope.process.family import process_start_ticks

SOURCE = "/proc, before it was reaped"


def spawn(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sh", "-c", code])


@pytest.fixture
def watch() -> DeathWatch:
    thread = DeathWatch(lambda: None)
    thread.start()
    return thread


def death(watch: DeathWatch) -> Death:
    return watch.deaths.get(timeout=20)


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [("sleep 0.2", 0, None), ("sleep 0.2; exit 7", 7, None), ("sleep 0.2; kill -11 $$", None, 11)],
)
def test_the_status_is_read_while_the_process_is_a_zombie(
    watch: DeathWatch, code: str, exit_code: int | None, number: int | None
) -> None:
    process = spawn(code)
    assert watch.watch("a", process.pid, process_start_ticks(process.pid))
    found = death(watch)
    process.wait()
    assert found.key == "a"
    assert found.status == ExitStatus(exit_code, number, SOURCE)


def test_where_the_kernel_tells_of_reaped_processes(watch: DeathWatch) -> None:
    process = spawn("exec sleep 600")
    descriptor = os.pidfd_open(process.pid)
    process.kill()
    process.wait()
    status = exits.read_pidfd(descriptor)
    os.close(descriptor)
    if status is None:
        pytest.skip("this kernel is older than 6.15: no exit status in a pidfd")
    assert status == ExitStatus(None, 9, "the kernel's pidfd")


def test_a_pid_that_is_already_somebody_else(watch: DeathWatch) -> None:
    process = spawn("exec sleep 600")
    ticks = process_start_ticks(process.pid)
    assert not watch.watch("a", process.pid, ticks + 1)
    process.kill()
    process.wait()
    assert not watch.watch("a", process.pid, ticks)


def no_pidfd(pid: int) -> int:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("pidfd_open", [None, no_pidfd])
def test_without_pidfd_the_pid_is_polled(pidfd_open: Callable[[int], int] | None) -> None:
    watch = DeathWatch(lambda: None, pidfd_open=pidfd_open)
    watch.start()
    process = spawn("sleep 0.3; exit 5")
    assert watch.watch("a", process.pid, process_start_ticks(process.pid))
    assert death(watch).status == ExitStatus(5, None, SOURCE)
    process.wait()
    assert PIDFD_OPEN is not None


def test_against_a_parent_that_polls_as_torchrun_does() -> None:
    """torchrun looks at its workers each tenth of a second; we must nearly always be first."""
    seen: queue.SimpleQueue[ExitStatus] = queue.SimpleQueue()
    watch = DeathWatch(lambda: None, lambda pid, ticks, status: seen.put(status))
    watch.start()
    for _ in range(20):
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.05)"])
        watch.watch("a", process.pid, process_start_ticks(process.pid))
        process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
        while process.poll() is None:
            time.sleep(0.1)
        assert death(watch).status is not None
    assert seen.qsize() == 20


@pytest.mark.parametrize(
    ("ended", "status", "reason", "words"),
    [
        (ring.CLEAN, ExitStatus(0, None, "x"), "clean", "exit code 0; reported by x"),
        (ring.CLEAN, None, "clean", "the process itself said"),
        (ring.CLEAN, ExitStatus(3, None, "x"), "exit_code", "exit code 3"),
        (ring.EXCEPTION, ExitStatus(1, None, "x"), "exception", "exit code 1"),
        (ring.EXCEPTION, None, "exception", "the process itself said"),
        (ring.EXCEPTION, ExitStatus(None, 15, "x"), "signal", "after an exception"),
        (ring.FINISHED, ExitStatus(1, None, "x"), "clean", "training was over"),
        (ring.FINISHED, ExitStatus(None, 9, "x"), "clean", "training was over"),
        (ring.FINISHED, None, "clean", "training was over"),
        (ring.RUNNING, ExitStatus(0, None, "x"), "clean", "os._exit"),
        (ring.RUNNING, ExitStatus(4, None, "x"), "exit_code", "exit code 4"),
        (ring.RUNNING, ExitStatus(None, 9, "x"), "signal", "signal 9 (SIGKILL)"),
        (ring.RUNNING, ExitStatus(None, 41, "x"), "signal", "signal 41"),
        (ring.RUNNING, None, "lost", "gone without a trace"),
        (ring.UNLOADED, None, "lost", "gone without a trace"),
        (77, None, "lost", "gone without a trace"),
    ],
)
def test_reasons(ended: int, status: ExitStatus | None, reason: str, words: str) -> None:
    found, detail = reason_of(ended, status)
    assert found == reason
    assert words in detail


def test_the_book_of_exits(tmp_path: Path) -> None:
    exit_statuses = ExitStatuses(tmp_path)
    assert exit_statuses.find(5, 1) is None
    exit_statuses.write(5, 100, ExitStatus(None, 9, "seen"))
    exits.append(tmp_path / exits.EXITS_FILE, 6, exits.from_code(-15, "torchrun's report"))
    exits.append(tmp_path / exits.EXITS_FILE, 7, exits.from_code(3, "torchrun's report"))
    with (tmp_path / exits.EXITS_FILE).open("a") as file:
        file.write('no json\n[]\n{"pid": "x"}\n{"pid": 8, "exit_code": 1, "sour')
    again = ExitStatuses(tmp_path)
    assert again.find(5, 100) == ExitStatus(None, 9, "seen")
    assert again.find(5, 101) is None  # the number was used again
    assert again.find(6, 1) == ExitStatus(None, 15, "torchrun's report")
    assert again.find(7, 1) == ExitStatus(3, None, "torchrun's report")
    assert again.find(8, 1) is None


def test_kills_by_the_oom_killer(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "vmstat").write_text("pgmajfault 5\noom_kill 2\n")
    oom = OomWatch(proc, cgroups)
    assert oom.counter_of(7) is None
    assert oom.count(None) == 2  # of the host
    (proc / "7" / "cgroup").write_text("0::/job/step\n")
    events = cgroups / "job" / "step" / "memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 0\noom 3\noom_kill 1\noom_group_kill 0\n")
    assert oom.counter_of(7) == events
    assert oom.count(events) == 1
    (proc / "7" / "cgroup").write_text("4:memory:/old\n0::/\n")
    control = cgroups / "memory" / "old" / "memory.oom_control"
    control.parent.mkdir(parents=True)
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom.counter_of(7) == control
    assert oom.count(control) == 4
