"""What Rankscope's server advises: which ranks to leave out, asked beside the training.

A thread asks now and then, with a time-out, and keeps what it was answered until the loop looks;
so neither a slow server nor one that is away costs a step. What was done with it is reported back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

from rankscope.http import Client, HttpError

logger = logging.getLogger("rankscope_trainer")

ASK_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
_CONTROLLER = "rankscope_trainer"


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """An advice to leave ranks out; each epoch of the advice is to be acted on once."""

    epoch: int
    ranks: tuple[int, ...]
    why: str


class Adviser:
    """The server that the environment names, as `rankscope run` sets it."""

    def __init__(self, environ: Mapping[str, str], pause_seconds: float = ASK_SECONDS) -> None:
        """Raises KeyError where no server, or no run, is named; AddressError for a bad address."""
        run = urllib.parse.quote(environ["RANKSCOPE_RUN_ID"], safe="")
        self._path = f"/api/v1/runs/{run}/advice"
        self._client = Client(
            environ["RANKSCOPE_SERVER"], environ.get("RANKSCOPE_TOKEN", ""),
            timeout_seconds=_ANSWER_SECONDS, program=_CONTROLLER,
        )  # fmt: skip
        self._pause_seconds = pause_seconds
        self._news: queue.SimpleQueue[Exclusion] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._acted_on = 0
        self._problem = ""
        self._wakes = threading.Event()  # there is a report, or the end
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Ask from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="trainer-advice", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ask no more, once what was done is reported."""
        self._is_closed = True
        self._wakes.set()
        if self._thread is not None:
            self._thread.join(2 * _ANSWER_SECONDS)

    def newest(self) -> Exclusion | None:
        """Return an advice that was not returned yet; None without any. Never waits."""
        found = None
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._news.get_nowait()
        return found

    def report(self, epoch: int, outcome: Literal["done", "refused", "ignored"], text: str) -> None:
        """Have the thread say what was done with an advice. Never waits."""
        self._reports.put(
            {"epoch": epoch, "outcome": outcome, "controller": _CONTROLLER, "text": text}
        )
        self._wakes.set()

    def _follow(self) -> None:
        while not self._is_closed:
            exclusion = exclusion_of(self._answer("GET", self._path), time.time() * 1e3)
            if exclusion is not None and exclusion.epoch > self._acted_on:
                self._acted_on = exclusion.epoch
                self._news.put(exclusion)
            self._wakes.wait(self._pause_seconds)
            self._wakes.clear()
            while not self._reports.empty():
                body = json.dumps(self._reports.get()).encode()
                self._answer("POST", f"{self._path}/reports", body)
        self._client.close()

    def _answer(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """Return the fields of an answer, none where there is none; a new reason is logged."""
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            answer = self._client.request(method, path, body, headers)
            problem = "" if answer.status < 400 else answer.why()
        except HttpError as error:
            answer, problem = None, str(error)
        if problem != self._problem:
            self._problem = problem
            logger.warning("advice: %s", problem or "the server answers again")
        return {} if problem or answer is None else answer.fields


def exclusion_of(advice: Mapping[str, Any], now_ms: float) -> Exclusion | None:
    """Return whom an advice leaves out; None where it says something else, or is too old."""
    is_fresh = now_ms < float(advice.get("valid_until_ms") or 0)
    ranks = tuple(int(rank) for rank in advice.get("ranks") or ())
    if advice.get("action") != "exclude_host" or not is_fresh or not ranks:
        return None
    return Exclusion(int(advice["epoch"]), ranks, str(advice.get("why", "")))
