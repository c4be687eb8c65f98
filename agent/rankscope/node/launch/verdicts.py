"""What the server concludes of a launched run, said in the terminal that started it.

A thread of the launcher asks now and then, so that a slow or absent server costs the command
nothing. A verdict is said once it has stood for two looks, and again when it changes.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

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
        self._address = f"{server.rstrip('/')}/api/v1/runs/{quote(run_id, safe='')}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
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
        """Say nothing any more."""
        self._stop.set()

    def last(self, timeout_seconds: float) -> Conclusion | None:
        """Return what is concluded of a run that is over; None where no answer came in time."""
        deadline = time.monotonic() + timeout_seconds
        found: Conclusion | None = None
        while self._answered or found is None:
            before, found = found, self._look() or found
            is_over = found is not None and found.status not in _NOT_OVER
            if (is_over and before == found) or time.monotonic() > deadline:
                break  # two looks agree
            if found is None and not self._answered:
                break  # it never answered: nobody waits for it now
            time.sleep(_FINAL_LOOK_SECONDS)
        return found

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            found = self._look()
            if found is None:
                continue
            is_new = found.key == self._seen and found.key != self._said
            self._seen = found.key
            if is_new and not self._stop.is_set():
                self._said = found.key
                for line in found.lines():
                    self._say(line)

    def _look(self) -> Conclusion | None:
        try:
            request = urllib.request.Request(self._address, headers=self._headers)
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
                overview = json.loads(reply.read(_MOST_BYTES))
            verdict = overview["verdict"]
            if verdict is not None and verdict["severity"] == "info":
                verdict = None
            conclusion = Conclusion(overview["run"]["status"], overview["answer"]["text"], verdict)
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return None
        self._answered, self.seen = True, conclusion
        return conclusion
