"""Watches the API for as long as what comes in may still change the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rankscope.demo.processes import Demo, DemoFailed

_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 3.0  # nothing may have changed for so long when the watch ends
_UNREPORTED_SECONDS = 30.0  # for an end that no collector is left to report
_STILL_SECONDS = 300.0  # for a run that neither ends nor continues
_PATIENCE_SECONDS = 180.0  # from the end of the training on, whatever still comes in
_NOT_OVER = ("starting", "running")


@dataclass(frozen=True)
class View:
    """What the API says at one moment."""

    run: dict[str, Any]
    findings: list[dict[str, Any]]
    verdict: dict[str, Any] | None
    answer: str
    loss: float | None

    @property
    def step(self) -> int:
        """The last step that the server knows."""
        return int(self.run.get("step") or 0)

    @property
    def accused(self) -> tuple[object, ...]:
        """What the verdict says, without the numbers that wobble."""
        verdict = self.verdict or {}
        return verdict.get("kind"), verdict.get("severity"), verdict.get("ranks")

    @property
    def evidence(self) -> tuple[object, ...]:
        """What must be the same in two views for nothing to have happened between them."""
        names = ("kind", "severity", "ranks", "state")
        findings = sorted(str([finding[name] for name in names]) for finding in self.findings)
        return self.run.get("status"), self.step, self.accused, findings


class Watch:
    """One watch of a demo. `clock` and `sleep` are in seconds."""

    def __init__(
        self,
        demo: Demo,
        once: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.last: View | None = None
        self.is_over = False
        self.arriving = ""  # what was still coming in when the patience ended
        self._demo, self._once = demo, once
        self._clock, self._sleep = clock, sleep
        self._ended: float | None = None
        self._seen: dict[str, tuple[object, float]] = {}  # by what: value, since when

    def views(self) -> Iterator[View]:
        """Yield a view twice a second until nothing more is to come.

        A hang never ends by itself: with `once` its ranks are stopped when the verdict has stood.
        Raises DemoFailed where the training ends and the server never hears of it.
        """
        while not self.is_over:
            has_ended = self._demo.training_ended()  # first: what is seen then is from after it
            arriving = self._demo.arriving() if has_ended else ""
            view = _look(self._demo)
            self.last = view or self.last
            if view is not None:
                yield view
            self.is_over = self._is_through(view, arriving) if has_ended else self._is_still(view)
            if not self.is_over:
                self._sleep(_LOOK_SECONDS)

    def _is_still(self, view: View | None) -> bool:
        """Return whether nothing more is to be expected of a training that has not ended."""
        quiet = self._quiet("evidence", view and view.evidence)
        stood = self._quiet("verdict", view and view.accused)
        if view is not None and (view.verdict or {}).get("kind") == "hang":
            if stood > _QUIET_SECONDS and self._once:
                self._demo.stop_training()
            return stood > _QUIET_SECONDS
        return quiet > _STILL_SECONDS

    def _is_through(self, view: View | None, arriving: str) -> bool:
        """Return whether nothing more is to be expected after the end of the training."""
        if self._ended is None:
            self._ended = self._clock()
        quiet = self._quiet("evidence", (view and view.evidence, bool(arriving), "ended"))
        if arriving or quiet <= _QUIET_SECONDS:
            if self._clock() - self._ended <= _PATIENCE_SECONDS:
                return False
            self.arriving = arriving or "findings still changed"
            return True
        is_reported = view is not None and view.run.get("status") not in _NOT_OVER
        if quiet <= _UNREPORTED_SECONDS and not is_reported:
            return False
        if view is None:
            raise DemoFailed(self._demo.last_words())
        return True

    def _quiet(self, name: str, value: object) -> float:
        """Return for how many seconds something has been as it is."""
        now = self._clock()
        before, since = self._seen.get(name, (None, now))
        if name not in self._seen or before != value:
            since = now
        self._seen[name] = value, since
        return now - since


def _look(demo: Demo) -> View | None:
    overview = demo.api.get(f"runs/{demo.run_id}")
    if overview is None:
        return None
    findings = demo.api.get(f"runs/{demo.run_id}/findings") or {}
    metrics = demo.api.get(f"runs/{demo.run_id}/metrics?names=loss") or {}
    values = [series["value"][-1] for series in metrics.get("series", []) if series["value"]]
    return View(
        run=overview["run"],
        findings=[*findings.get("open", []), *findings.get("recovered", [])],
        verdict=overview.get("verdict"),
        answer=(overview.get("answer") or {}).get("text", ""),
        loss=values[0] if values else None,
    )
