"""The child that imports torch and runs collectives, so that the agent itself never does.

    python -m rankscope.preflight.collective FD

It imports torch at once, waits for one line of JSON on stdin (the plan), works, and reports what it
does as lines of JSON on the pipe FD. It ends when stdin closes: no process listens any longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOW_PRIORITY = 10  # a tenth of the share of others; the lowest may starve for a minute
_MAX_ERROR_CHARACTERS = 2000


class Channel:
    """The pipe to the agent. A line is short, so that the kernel writes it whole."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def report(self, event: str, **fields: Any) -> None:
        """Write one event."""
        os.write(self._fd, json.dumps({"event": event, **fields}).encode() + b"\n")


def main() -> int:
    """Import, wait for the plan, work. Return the exit code."""
    _die_with_parent()
    channel = Channel(int(sys.argv[1]))
    try:
        _prepare(channel)
        line = sys.stdin.readline()
        if not line:
            return 0
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        from rankscope.preflight.collective.work import CollectivePlan, work

        work(msgspec.json.decode(line, type=CollectivePlan), channel.report)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
        channel.report("error", text=text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # gloo's threads, left in a broken group, may hold up an ordinary end
    return 0


def _prepare(channel: Channel) -> None:
    """Import torch and ask gloo, politely: the agent times paths of microseconds meanwhile.

    Priorities belong to threads, and cannot be raised again: so a thread of its own imports, and
    this one is as quick as ever when the collectives are timed.
    """
    errors: list[Exception] = []

    def work() -> None:
        with contextlib.suppress(OSError, AttributeError):  # no such call, or forbidden
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            _import(channel)
        except Exception as error:  # noqa: BLE001 - raised again by the one that waits
            errors.append(error)

    thread = threading.Thread(target=work, name="import")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _import(channel: Channel) -> None:
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if _has(dist, name)]
    channel.report("imported", backends=backends)
    if "gloo" in backends:
        from rankscope.preflight.collective.truth import ask_gloo

        channel.report("gloo", choices=msgspec.to_builtins(ask_gloo(os.environ)))


def _has(dist: Any, backend: str) -> bool:
    return dist.is_available() and bool(getattr(dist, f"is_{backend}_available")())


def _die_with_parent() -> None:
    """Be killed when the agent dies, even by SIGKILL. Linux only; elsewhere stdin shows it."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:
        sys.exit(1)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
