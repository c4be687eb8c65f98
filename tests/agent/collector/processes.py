"""Starts fake ranks and collectors as real processes, and waits for what they should do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.files.start_collector import collector_environment, ensure_collector

FAKE_RANK = Path(__file__).parent / "fake_rank.py"


def environment(**settings: object) -> dict[str, str]:
    """Return an environment with these settings and no others of ours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")}
    return clean | {f"RANKSCOPE_{name.upper()}": str(value) for name, value in settings.items()}


def start_rank(
    run: Path, rank: int, count: int = 100, rate: float = 1000, end: str = "clean"
) -> subprocess.Popen[str]:
    arguments = [str(run), str(rank), str(count), str(rate), end]
    return subprocess.Popen(
        [sys.executable, str(FAKE_RANK), *arguments], stdout=subprocess.PIPE, text=True
    )


def start_collector(run: Path, **settings: object) -> subprocess.Popen[bytes]:
    """Start a collector in the foreground."""
    return subprocess.Popen(
        [sys.executable, "-m", "rankscope.node", "--run-dir", str(run)],
        env=collector_environment(environment(**settings)),
    )


def collector_pid(run: Path) -> int:
    return int((run / "node" / "pid").read_text())


def ensure(run: Path, **settings: object) -> bool:
    return ensure_collector(run, environment(**settings))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(what: Callable[[], object], seconds: float = 30.0) -> float:
    """Wait until something is true and return how long it took."""
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a process of ours, whatever it does."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
