"""Takes the Python stacks of a rank that looks stuck, from outside.

faulthandler, registered by the rank for a real-time signal, writes them without the interpreter
lock. The default action of such a signal kills, so it is sent only to a process that is still the
same, has not ended, and whose kernel mask says that a handler is in place (an exec removes it).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rankscope.files import ring
from rankscope.node.processes.exits import PROC
from rankscope.process.family import process_start_ticks

MAX_PER_INCIDENT = 3  # of those that no user asked for
BETWEEN_NS = 2_000_000_000
CALM_NS = 60_000_000_000  # from the last stacks of an incident to the first of the next
OWN_THREAD = ("rankscope/rank/hooks/collectives/standing.py", "rankscope-standing")  # file, name
_WRITE_NS = 2_000_000_000  # a handler has this long to write
_MAX_TEXT = 250_000


@dataclass(frozen=True)
class Look:
    """What the header of a rank says at one moment; times are monotonic ns."""

    pid: int
    start_ticks: int
    stack_signal: int
    ended: int
    heartbeat_ns: int
    oldest_open_ns: int  # 0 none
    oldest_inside_ns: int  # 0 none
    step: int = 0
    world_size: int = 0
    thinning: int = 0  # level in force
    thinning_wanted: int = 0
    thinning_asked: int = 0


@dataclass(frozen=True)
class Taken:
    """Stacks that were written, and the commands that asked for them."""

    text: str
    reason: str
    commands: tuple[int, ...] = ()


class StackTaker:
    """Stacks of one rank. `send_signal(pid, start_ticks, number)` returns whether it was sent."""

    def __init__(
        self,
        path: Path,
        offset: int,
        send_signal: Callable[[int, int, int], bool],
        hang_ns: int,
        *,
        has_fallback: bool = False,
    ) -> None:
        self.offset = offset
        self.has_fallback = has_fallback  # stacks can be had without a handler in the rank
        self._path = path
        self._send_signal = send_signal
        self._hang_ns = hang_ns
        self._taken = 0
        self._asked_ns = 0
        self._waits = False
        self._size = -1
        self._last_text = ""
        self._reason_text = ""
        self._requests: dict[int, str] = {}  # command -> who asked
        self._asked_for: tuple[int, ...] = ()
        self._answers: list[tuple[int, Literal["done", "refused"], str]] = []

    def request(self, command: int, asked_by: str, *, is_automatic: bool) -> None:
        """Take stacks soon. A detector that asks shares the budget of the incident with us."""
        if is_automatic and self._taken >= MAX_PER_INCIDENT:
            self._answers.append((command, "done", "this incident's stacks were taken already"))
            return
        self._requests[command] = asked_by
        self._taken += is_automatic

    def take_answers(self) -> list[tuple[int, Literal["done", "refused"], str]]:
        """Return (command, state, reason) of the requests that are done with."""
        answers, self._answers = self._answers, []
        return answers

    def turn(self, look: Look, now_ns: int, group_is_stuck: bool) -> Taken | None:
        """Ask for stacks if it is time; return new ones when they are there.

        `group_is_stuck`: some rank of this node has a collective open for too long.
        """
        if self._waits:
            return self._collect(now_ns)
        reason = self._reason(look, now_ns, group_is_stuck)
        if not reason and now_ns - self._asked_ns > CALM_NS:
            self._taken = 0
        if self._asked_ns and now_ns - self._asked_ns < BETWEEN_NS:
            return None
        asked_for = tuple(self._requests)
        if not asked_for and (not reason or self._taken >= MAX_PER_INCIDENT):
            return None
        if asked_for:
            asked = "asked for by " + " and ".join(dict.fromkeys(self._requests.values()))
            reason = f"{reason}, {asked}" if reason else asked
            self._requests.clear()
        else:
            self._taken += 1
        self._asked_ns = now_ns
        if self._send_signal(look.pid, look.start_ticks, look.stack_signal):
            self._waits, self._reason_text, self._size = True, reason, -1
            self._asked_for = asked_for
        else:
            self._answer(asked_for, "refused", "the signal for stacks could not be sent")
        return None

    def _answer(
        self, commands: tuple[int, ...], state: Literal["done", "refused"], reason: str = ""
    ) -> None:
        self._answers += [(command, state, reason) for command in commands]

    def _reason(self, look: Look, now_ns: int, group_is_stuck: bool) -> str:
        if look.ended != ring.RUNNING or not (look.stack_signal or self.has_fallback):
            return ""
        silent_ns = now_ns - look.heartbeat_ns if look.heartbeat_ns else 0
        inside_ns = now_ns - look.oldest_inside_ns if look.oldest_inside_ns else 0
        if inside_ns > self._hang_ns:
            return f"inside a collective for {inside_ns / 1e9:.1f} s"
        if silent_ns > self._hang_ns and group_is_stuck:
            return f"no sign of life for {silent_ns / 1e9:.1f} s while a collective is open"
        return ""

    def _collect(self, now_ns: int) -> Taken | None:
        """Read what was written once the file has stopped growing."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if now_ns - self._asked_ns < _WRITE_NS and (size <= self.offset or size != self._size):
            self._size = size
            return None
        self._waits = False
        asked_for, self._asked_for = self._asked_for, ()
        if size <= self.offset:
            self._answer(asked_for, "refused", "the rank wrote nothing within 2 s of the signal")
            return None
        with self._path.open("rb") as file:
            file.seek(self.offset)
            text = file.read(size - self.offset)[-_MAX_TEXT:].decode(errors="replace").strip()
            text = _without_ours(text)
        self.offset = size
        self._answer(asked_for, "done")
        if text == self._last_text and not asked_for:
            return None
        self._last_text = text
        return Taken(text, self._reason_text, asked_for)


def _without_ours(text: str) -> str:
    """Leave out the agent's own thread of a rank, which would stand before the script's."""
    threads = text.split("\n\n")
    kept = [one for one in threads if not any(mark in one for mark in OWN_THREAD)]
    return "\n\n".join(kept or threads)


def send_stack_signal(pid: int, start_ticks: int, number: int, proc: Path = PROC) -> bool:
    """Send the signal if that is safe; return whether it was sent."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        descriptor = -1  # an old kernel: the pid and its start say who it is
    try:
        if process_start_ticks(pid) != start_ticks or not _is_caught(pid, number, proc):
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(pid, number)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def _is_caught(pid: int, number: int, proc: Path) -> bool:
    """Return whether the process has a handler for this signal."""
    for line in (proc / str(pid) / "status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
