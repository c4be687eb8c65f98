"""What is concluded of a launched run, said in the terminal that started it.

The server concludes; without one what the run left in files is looked at when it is over. A thread
of the launcher asks the server now and then, so that a slow or absent one costs the command
nothing. A verdict is said once it has stood for two looks, and again when it changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rankscope.address import AddressError
from rankscope.http import HttpError, get, json_object

LOOK_SECONDS = 5.0
_FINAL_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 4 << 20
_NOT_OVER = ("starting", "running", "stuck")


@dataclass(frozen=True)
class Conclusion:
    """What the first panel of the run's page says."""

    status: str
    answer: str
    verdict: dict[str, Any] | None  # None: there is none above info

    @property
    def key(self) -> tuple[str, tuple[int, ...]] | None:
        """Return what makes it another verdict: its kind and its ranks."""
        if self.verdict is None:
            return None
        return str(self.verdict["kind"]), tuple(self.verdict["ranks"])

    def lines(self) -> list[str]:
        """Return three lines for people, or one where there is no verdict."""
        if self.verdict is None:
            return [f"verdict: {self.answer}"]
        parts = (("verdict", "what"), ("why", "why"), ("next", "next"))
        return [f"{name}: {self.verdict[key]}" for name, key in parts if self.verdict[key]]


class Verdicts:
    """Follows one run on its server. `say` gets lines for people."""

    def __init__(self, server: str, token: str, run_id: str, say: Callable[[str], None]) -> None:
        self._server, self._token = server, token
        self._path = f"/api/v1/runs/{quote(run_id, safe='')}"
        self._say = say
        self._stop = threading.Event()
        self._seen: tuple[str, tuple[int, ...]] | None = None  # in the look before
        self._said: tuple[str, tuple[int, ...]] | None = None
        self._answered = False
        self.seen: Conclusion | None = None  # by the last look that was answered
        self._thread = threading.Thread(target=self._follow, name="rankscope-verdicts", daemon=True)

    def start(self) -> None:
        """Follow the run from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Print nothing from now on."""
        self._stop.set()

    def last(self, timeout_seconds: float) -> Conclusion | None:
        """Return what is concluded of a run that is over; None where no answer came in time."""
        deadline = time.monotonic() + timeout_seconds
        conclusion: Conclusion | None = None
        while self._answered or conclusion is None:
            before, conclusion = conclusion, self._look() or conclusion
            is_over = conclusion is not None and conclusion.status not in _NOT_OVER
            if (is_over and before == conclusion) or time.monotonic() > deadline:
                break  # two looks agree
            if conclusion is None and not self._answered:
                break  # it never answered: stop waiting for it
            time.sleep(_FINAL_LOOK_SECONDS)
        return conclusion

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            conclusion = self._look()
            if conclusion is None:
                continue
            is_new = conclusion.key == self._seen and conclusion.key != self._said
            self._seen = conclusion.key
            if is_new and not self._stop.is_set():
                self._said = conclusion.key
                for line in conclusion.lines():
                    self._say(line)

    def _look(self) -> Conclusion | None:
        try:
            answer = get(
                self._server, self._path, self._token,
                timeout_seconds=_ANSWER_SECONDS, max_answer_bytes=_MOST_BYTES,
            )  # fmt: skip
            conclusion = _conclusion_of(answer.fields)
        except (HttpError, AddressError, ValueError, KeyError, TypeError):
            return None
        self._answered, self.seen = True, conclusion
        return conclusion


def of_files(directory: Path, timeout_seconds: float) -> Conclusion:
    """Return what is concluded of a run directory, by `rankscope report` in a process of its own.

    Whatever happens there costs the command nothing. Without a conclusion it says why.
    """
    command = [sys.executable, "-m", "rankscope", "report", "--json", str(directory)]
    try:
        done = subprocess.run(
            command, env=os.environ | {"RANKSCOPE": "0"}, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Conclusion("", f"none within {timeout_seconds:g} s", None)
    report = json_object(done.stdout)
    try:
        return _conclusion_of(report)
    except (KeyError, TypeError):
        why = str(report.get("error", f"exit code {done.returncode}"))
        return Conclusion("", f"none: {why.removeprefix('rankscope report: ')}", None)


def _conclusion_of(overview: dict[str, Any]) -> Conclusion:
    """Return what a page or a report concludes. Raises KeyError, TypeError for anything else."""
    verdict = overview["verdict"]
    if verdict is not None and verdict["severity"] == "info":
        verdict = None
    return Conclusion(overview["run"]["status"], overview["answer"]["text"], verdict)
