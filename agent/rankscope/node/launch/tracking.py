"""Writes a launched run into trackers: `rankscope track --follow`, in a process beside it.

Whatever happens there costs the command nothing. What it says is in a file of the run directory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from rankscope.http import json_object
from rankscope.settings import SettingError, Settings
from rankscope.wire.trackers import TITLES

_LOG, _RESULT = "track.log", "track.json"
_NICE = 10  # ranks go first


def trackers_of(settings: Settings) -> list[str]:
    """Return the trackers that are asked for. Raises SettingError for one that is not known."""
    names = [name.strip() for name in settings.track.split(",") if name.strip()]
    for name in names:
        if name not in TITLES:
            known = ", ".join(TITLES)
            raise SettingError(f"there is no tracker {name!r}: use {known}")
    if names and not settings.server:
        raise SettingError("--track needs a server, which follows the run: pass --server")
    return names


class Tracking:
    """One run that is written to trackers from its begin to its end."""

    def __init__(
        self, trackers: Sequence[str], run_id: str, folder: Path, environ: Mapping[str, str]
    ) -> None:
        """`folder` is the launcher's own; `environ` that of the command, which trackers read."""
        self._command = [
            sys.executable, "-m", "rankscope", "track", run_id, "--follow", "--json",
            "--only-on-host-of-rank-0", *(word for name in trackers for word in ("--to", name)),
        ]  # fmt: skip
        self._environ = {**environ, "RANKSCOPE": "0"}
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to follow the run. Raises OSError."""
        with self._file(_LOG) as log, self._file(_RESULT) as result:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=result,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(OSError):  # it is over already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def finish(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait until all is written, and say where it is; what takes longer is left to end."""
        if self._process is None:
            return
        log = self._folder / _LOG
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            say(f"trackers are still written to: {log} says how that ends")
            return
        said = ""
        with contextlib.suppress(OSError):
            said = log.read_text(errors="replace")
        for line in said.splitlines():
            if line.startswith("rankscope track: "):
                say(line.removeprefix("rankscope track: "))
        if self._process.returncode and not json_object((self._folder / _RESULT).read_bytes()):
            say(f"not all was written to trackers: {log}")

    def _file(self, name: str) -> IO[bytes]:
        return (self._folder / name).open("wb")
