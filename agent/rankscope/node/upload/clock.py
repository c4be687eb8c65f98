"""How far this host's wall clock is from the server's, by four times of a request.

The host sends at t1, the server receives at t2 and answers at t3, the host has the answer at t4.
Whatever the two ways took, the server's clock minus ours is ((t2 - t1) + (t3 - t4)) / 2, wrong by
at most half the time under way: the error band. Of several exchanges the fastest is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rankscope.http import json_object
from rankscope.wire import schema

CLOCK_PATH = "/api/v1/clock"
EXCHANGES = 16
EVERY_SECONDS = 60.0
_RETRY_SECONDS = 10.0
_MAX_STEP_NS = 1_000_000  # our own clock was set in the middle of an exchange


Ask: TypeAlias = Callable[[], tuple[int, str]]  # one request: status, 0 for none, and text


@dataclass(frozen=True)
class Offset:
    """`offset_ns` is the server's clock minus ours, right to `band_ns` on either side."""

    offset_ns: int
    band_ns: int


class ClockExchange:
    """Measures every minute; `report` is given the record. Clocks are parameters for tests."""

    def __init__(
        self,
        report: Callable[[schema.Record], None],
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        host: str = "",
    ) -> None:
        self._report = report
        self._host = host
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._due_ns = 0
        self._said = False

    def turn(self, ask: Ask) -> None:
        """Measure if it is time to."""
        now = self._monotonic_ns()
        if now < self._due_ns:
            return
        best, why = self.measure(ask)
        seconds = EVERY_SECONDS if best else _RETRY_SECONDS
        self._due_ns = now + int(seconds * 1e9)
        if best is not None:
            self._report(
                schema.ClockOffset(
                    attempt=0, rank=schema.NODE_RANK, time_ns=self._wall_ns(), host=self._host,
                    offset_ns=best.offset_ns, band_ns=best.band_ns,
                )
            )  # fmt: skip
        elif not self._said:
            self._said = True
            self._report(
                schema.Event(
                    attempt=0, rank=schema.NODE_RANK, time_ns=self._wall_ns(),
                    name="clock offset unknown", fields={"reason": why},
                )
            )  # fmt: skip

    def measure(self, ask: Ask) -> tuple[Offset | None, str]:
        """Return the best of some exchanges; None and the reason where none succeeded."""
        best: Offset | None = None
        why = ""
        for _ in range(EXCHANGES):
            found = self._exchange(ask)
            if isinstance(found, str):
                why = found
                break
            if best is None or found.band_ns < best.band_ns:
                best = found
        return best, why

    def _exchange(self, ask: Ask) -> Offset | str:
        begun, sent = self._monotonic_ns(), self._wall_ns()
        status, text = ask()
        came, ended = self._wall_ns(), self._monotonic_ns()
        if status != 200:
            return f"the server answers {status}" if status else text
        try:
            answer = json_object(text)
            received, answered = int(answer["received_ns"]), int(answer["sent_ns"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return "the server's answer has no times"
        if abs((came - sent) - (ended - begun)) > _MAX_STEP_NS:
            return "this host's clock was set while it was compared"
        under_way = (ended - begun) - (answered - received)
        if answered < received or under_way < 0:
            return "the server's clock was set while it was compared"
        return Offset(((received - sent) + (answered - came)) // 2, (under_way + 1) // 2)
