"""SwanLab: an experiment of its own in the project of the script's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import swanlab
from swanlab.exceptions import AuthenticationError

from rankscope.trackers import PREFIX, Conclusion, StepNumbers, Target


class SwanLabRun:
    """An experiment whose configuration names the script's and the page."""

    failures: ClassVar[tuple[type[Exception], ...]] = (AuthenticationError, OSError, RuntimeError)
    written_to = 0

    def __init__(self, target: Target) -> None:
        self._target = target
        own = target.own
        project = target.project or own.get("project") or os.environ.get("SWANLAB_PROJ_NAME")
        mode: Any = own.get("mode") or os.environ.get("SWANLAB_MODE") or None
        self._run = swanlab.init(
            project=project or "rankscope", name=target.other_name, mode=mode,
            log_dir=target.store or own.get("store") or None, description=target.page,
            config={"rankscope": {"run": target.run_id, "page": target.page,
                                  "of": target.into or own.get("run", "")}},
            settings=swanlab.Settings(probe={"monitor": False, "requirements": False}),
        )  # fmt: skip
        self.place = self._run.url if self._run.mode == "online" else str(self._run.dir)

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write numbers of steps."""
        for one in steps:
            self._run.log(one.values, step=one.step)

    def conclude(self, conclusion: Conclusion) -> None:
        """Write it as a text of its step."""
        self._run.log(conclusion.numbers(), step=conclusion.step)
        text = conclusion.markdown(self._target)
        self._run.log_text(key=f"{PREFIX}verdict", data=text, step=conclusion.step)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish(state="crashed" if failed else "success")
