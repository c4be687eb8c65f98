"""trackio: a run of its own in the project of the script's."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Any, ClassVar

import trackio

from rankscope.trackers import PREFIX, Conclusion, StepNumbers, Target


class TrackioRun:
    """A run of the same project; a verdict is an alert of it."""

    failures: ClassVar[tuple[type[Exception], ...]] = (ValueError, OSError, sqlite3.Error)

    def __init__(self, target: Target) -> None:
        self._target = target
        project = target.project or target.own.get("project") or "rankscope"
        self._run: Any = trackio.init(
            project, name=target.other_name, resume="allow", server_url=target.store or None,
            config={"rankscope": {"run": target.run_id, "page": target.page,
                                  "of": target.own.get("run", "")}},
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self._said = ""
        self.written_to = 0
        self.place = f"project {project} in {os.environ.get('TRACKIO_DIR') or 'trackio'}"

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write numbers of steps."""
        for one in steps:
            self._run.log(one.values, step=one.step)

    def conclude(self, conclusion: Conclusion) -> None:
        """Write it as Markdown at its step, and a finding as an alert, once."""
        text = trackio.Markdown(conclusion.markdown(self._target))
        self._run.log({f"{PREFIX}verdict": text} | conclusion.numbers(), step=conclusion.step)
        if conclusion.kind and conclusion.answer != self._said:
            self._run.alert(conclusion.answer, self._target.page)
            self._said = conclusion.answer

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()
