"""Faults that end a rank or hold it for ever: what the operating system says about the process.

Most of them need no training. They run in a process that only fires them, beside a thread that
adds a byte to a file every few milliseconds: as long as the file grows, Python threads run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.trainer.launch import (
    COUNTED_TRAINER,
    Finished,
    read_manifest,
    run,
    with_checkpoints,
)

PROCESS = """
import faulthandler, signal, sys, threading, time
from pathlib import Path
from rankscope_trainer.faults.fault import Place
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.json_lines import JsonLines
from rankscope_trainer.faults.plan import parse_fault

folder = Path(sys.argv[1])
faulthandler.register(signal.SIGUSR1, file=(folder / "stacks").open("w"))

def tick():
    with (folder / "ticks").open("ab", buffering=0) as file:
        while True:
            file.write(b".")
            time.sleep(0.005)

threading.Thread(target=tick, daemon=True).start()
while not (folder / "ticks").exists():
    time.sleep(0.005)
plan = parse_fault(sys.argv[2] + ":rank=0,start=1,steps=1", 1, 9)
injector = Injector([plan], rank=0, manifest=JsonLines(str(folder / "manifest.jsonl")))
injector.begin_step(1)
injector.fire(Place.BEFORE_FORWARD)
injector.begin_step(2)
print("went on")
"""


def _start(fault: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(folder), fault]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _ticks_more(folder: Path, within_seconds: float = 1.0) -> bool:
    """Return whether the other thread runs."""
    before = (folder / "ticks").stat().st_size
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if (folder / "ticks").stat().st_size > before + 1:  # one may have been under way
            return True
    return False


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("os_exit", 3),
        ("sigkill", -signal.SIGKILL),
        ("segfault", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
    ],
)
def test_the_process_ends_as_the_fault_says(fault: str, code: int, tmp_path: Path) -> None:
    with _start(fault, tmp_path) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "went on" not in output
    assert "Traceback" not in errors
    (line,) = read_manifest(tmp_path)  # no end: no process was there to write it
    assert (line["fault"], line["start_step"], line["pid"]) == (fault, 1, process.pid)


def test_hang_lock_waits_for_a_lock_while_other_threads_run(tmp_path: Path) -> None:
    with _start("hang_lock", tmp_path) as process:
        _wait_until(lambda: read_manifest(tmp_path))

        def waiting() -> list[str]:
            """Return the functions of the fault in which both threads are now."""
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
            lines = (tmp_path / "stacks").read_text().splitlines()
            return [line.rpartition(" in ")[2] for line in lines if "processes.py" in line][-2:]

        _wait_until(lambda: waiting() == ["report", "fire"])
        assert _ticks_more(tmp_path, within_seconds=30)
        assert waiting() == ["report", "fire"]
        assert process.poll() is None
        process.kill()


def test_hang_gil_lets_no_other_thread_run(tmp_path: Path) -> None:
    with _start("hang_gil", tmp_path) as process:
        _wait_until(lambda: read_manifest(tmp_path))
        _wait_until(lambda: not _ticks_more(tmp_path, within_seconds=0.2))  # it has the lock now
        assert not _ticks_more(tmp_path)
        assert process.poll() is None
        assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
        process.kill()


def test_hang_stopped_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    with _start("hang_stopped", tmp_path) as process:
        _wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        assert not _ticks_more(tmp_path)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "went on\n")
    begin, end = read_manifest(tmp_path)
    assert end["end_time_ns"] - begin["start_time_ns"] > 0.9e9  # as long as it was watched


@pytest.mark.multiproc
def test_out_of_memory_is_the_allocators_own_error(tmp_path: Path) -> None:
    fault = "out_of_memory:rank=0,start=2,size=32MiB"
    finished = run(tmp_path, 0, "--steps", "4", "--fault", fault)
    assert finished.code == 1
    last = finished.output.strip().splitlines()[-1]
    assert "DefaultCPUAllocator: can't allocate memory" in last
    begin, end = finished.manifest()
    assert (begin["fault"], begin["start_step"], begin["size"]) == ("out_of_memory", 2, "32MiB")
    # What PyTorch had mapped before it may give out again; the limit holds for the rest.
    assert 4 <= end["allocated_mib"] <= 128


def _fill_disk(folder: Path, program: Path) -> Finished:
    arguments = with_checkpoints(folder, "--fault disk_full:rank=0,start=3", steps=6, every=2)
    finished = run(folder, 0, *arguments, program=program)
    assert finished.code == 1, finished.output
    begin, end = finished.manifest()
    assert (begin["fault"], begin["start_step"], end["end_step"]) == ("disk_full", 4, 4)
    saved = folder / "checkpoints"
    assert (saved / "step-00000002" / "checkpoint.json").exists()  # no other thread saw the mount
    assert not (saved / "step-00000004").exists()
    return finished


@pytest.mark.multiproc
@pytest.mark.needs("root", "mount")
def test_disk_full_is_the_kernels_own_error(tmp_path: Path) -> None:
    finished = _fill_disk(tmp_path, COUNTED_TRAINER)
    assert "No space left on device" in finished.output
    assert finished.manifest()[1]["mechanism"] == "tmpfs"


@pytest.mark.multiproc
def test_without_the_right_to_mount_files_may_only_be_small(tmp_path: Path) -> None:
    program = tmp_path / "without_mounting.py"
    program.write_text(
        "import runpy\n"
        "from rankscope_trainer.faults import checkpoints\n"
        "checkpoints.mount_small_disk = lambda folder, size_kib: False\n"
        f"runpy.run_path({str(COUNTED_TRAINER)!r}, run_name='__main__')\n"
    )
    finished = _fill_disk(tmp_path, program)
    assert "File too large" in finished.output
    assert finished.manifest()[1]["mechanism"] == "RLIMIT_FSIZE"


@pytest.mark.multiproc
def test_port_in_use_is_the_stores_own_error(tmp_path: Path) -> None:
    finished = run(tmp_path, 2, "--steps", "4", "--fault", "port_in_use:rank=0")
    assert finished.code == 1
    begin = finished.manifest()[0]
    assert (begin["fault"], begin["rank"]) == ("port_in_use", 0)
    assert "EADDRINUSE" in finished.output, finished.output
    assert "torch.distributed.DistNetworkError" in finished.output
    assert not (tmp_path / "losses.jsonl").exists()
