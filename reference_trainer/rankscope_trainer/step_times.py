"""When each step began and ended, by this rank's own clock: the truth for tools that measure.

One JSON line for each step of each rank, in a file that all ranks of a host may share, as each line
is a single write to its end:

    {"rank": 1, "restarts": 0, "step": 4, "began_ns": ..., "trained_ns": ..., "ended_ns": ...}

From `began_ns` to `trained_ns` the rank draws its batch, computes, waits for others and updates;
until `ended_ns` it validates and writes a checkpoint, where they are due. Stages of model_parallel
and workers of parameter servers add for how long of it they waited, `waited_seconds`. A step in
which the rank dies has no line.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class StepTimes:
    """Writes the lines of one rank; without a path it keeps nothing."""

    def __init__(self, path: str, *, rank: int, restarts: int) -> None:
        """Open the file."""
        self._rank = {"rank": rank, "restarts": restarts}
        self._file: int | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._began_ns = self._trained_ns = 0

    def begin(self) -> None:
        """A step begins."""
        self._began_ns = time.time_ns()

    def trained(self) -> None:
        """Its update is done."""
        self._trained_ns = time.time_ns()

    def end(self, step: int, waited_seconds: float | None = None) -> None:
        """Nothing more is done in it: write the line."""
        if self._file is None:
            return
        line = {
            **self._rank,
            "step": step,
            "began_ns": self._began_ns,
            "trained_ns": self._trained_ns,
            "ended_ns": time.time_ns(),
            **({} if waited_seconds is None else {"waited_seconds": waited_seconds}),
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
