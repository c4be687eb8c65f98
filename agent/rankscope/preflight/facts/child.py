"""Asks a child process what may hang in the kernel, and distinguishes a hang from a busy machine.

A child's first line is STARTED, written just before it touches what may hang. Without that line
it never came so far: that says nothing about the disk or the driver.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.preflight.system import Done, System

STARTED = "started"  # the children write it by themselves: they import nothing of ours


class Hung(Exception):
    """The child started, and did not answer: each time that it was asked."""


class NotKnown(Exception):
    """The child did not come so far, or broke: nothing is known."""


def ask(system: System, argv: Sequence[str], limit_s: float, times: int = 2) -> str:
    """Return what the child prints. Raises Hung, or NotKnown, with the reason."""
    for _ in range(times):
        done = system.run(argv, limit_s)
        first, _, rest = done.out.partition("\n")
        if done.code is None and first != STARTED:
            raise NotKnown(done.err if not done.out else f"it printed {first[:60]!r}")
        if done.code is not None:
            break
    else:
        raise Hung(f"no answer in {limit_s:g} s")
    if first != STARTED or not rest:
        raise NotKnown(_why(done))
    return rest


def _why(done: Done) -> str:
    """Return what a child said at its end; of a crash, where in it that was."""
    lines = done.err.strip().splitlines() or [f"exit code {done.code}"]
    if lines[0].startswith("Fatal Python error"):  # by faulthandler; the innermost frames first
        frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        return ", ".join([lines[0], *frames[:3]])
    return lines[-1]
