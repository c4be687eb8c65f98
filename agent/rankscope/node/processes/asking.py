"""Asks a rank for its stacks: by the signal that it has a handler for, else with py-spy.

py-spy reads the memory of the other process, which needs the same user and, where the kernel
restricts it, the right to trace. `--nonblocking` does not even stop the rank for it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from rankscope.node.processes.stacks import send_stack_signal
from rankscope.process.family import process_start_ticks

_LONGEST_SECONDS = 10.0


class StackAsker:
    """What a StackTaker sends with. py-spy writes to the file that the handler would write to."""

    def __init__(self, path: Path, program: str = "") -> None:
        self._path = path
        self._program = program or find_pyspy()
        self._running: subprocess.Popen[bytes] | None = None
        self._begun = 0.0

    @property
    def has_fallback(self) -> bool:
        """Whether a rank without a handler can be looked at too."""
        return bool(self._program)

    def __call__(self, pid: int, start_ticks: int, number: int) -> bool:
        """Ask; return whether stacks can be expected."""
        if number and send_stack_signal(pid, start_ticks, number):
            return True
        return self._dump(pid, start_ticks)

    def _dump(self, pid: int, start_ticks: int) -> bool:
        if not self._program or self._is_busy() or process_start_ticks(pid) != start_ticks:
            return False
        try:
            with self._path.open("ab") as file:
                self._running = subprocess.Popen(
                    [self._program, "dump", "--nonblocking", "--pid", str(pid)],
                    stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL,
                )  # fmt: skip
        except OSError:
            return False
        self._begun = time.monotonic()
        return True

    def _is_busy(self) -> bool:
        running = self._running
        if running is None or running.poll() is not None:
            return False
        if time.monotonic() - self._begun > _LONGEST_SECONDS:
            running.kill()
            running.wait()
            return False
        return True


def find_pyspy() -> str:
    """Return the path of py-spy, beside this Python or on the PATH; empty without one."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy") or ""
