"""Comet: an experiment of its own in the project of the script's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import comet_ml
from comet_ml.exceptions import CometException

from rankscope.trackers import PREFIX, Conclusion, StepNumbers, Target


class CometExperiment:
    """An experiment that names the script's and the page; nothing of this process is logged."""

    failures: ClassVar[tuple[type[Exception], ...]] = (CometException, OSError, ValueError)
    written_to = 0

    def __init__(self, target: Target) -> None:
        self._target = target
        own = target.own
        options: dict[str, Any] = {
            "project_name": target.project or own.get("project") or None,
            "display_summary_level": 0, "log_code": False, "log_graph": False,
            "log_env_details": False, "log_git_metadata": False, "log_git_patch": False,
            "auto_output_logging": False, "parse_args": False,
        }  # fmt: skip
        self._is_offline = own.get("mode") == "offline" or bool(target.store)
        if self._is_offline:
            folder = target.store or own.get("store") or None
            options["offline_directory"] = folder
            self._experiment: Any = comet_ml.OfflineExperiment(**options)
        else:
            self._experiment = comet_ml.Experiment(**options)
        self._experiment.set_name(target.other_name)
        self._experiment.log_other(f"{PREFIX}of", target.into or own.get("run", ""))
        self.place = self._place()

    def _place(self) -> str:
        if not self._is_offline:
            return str(self._experiment.url)
        archive = f"{self._experiment.get_key()}.zip"
        return os.path.abspath(os.path.join(self._experiment.offline_directory, archive))

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write numbers of steps."""
        for one in steps:
            self._experiment.log_metrics(one.values, step=one.step)

    def conclude(self, conclusion: Conclusion) -> None:
        """Write it as what Comet calls others, which the table of experiments shows."""
        self._experiment.log_metrics(conclusion.numbers(), step=conclusion.step)
        for name, text in conclusion.texts(self._target).items():
            self._experiment.log_other(f"{PREFIX}{name}", text)

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        self._experiment.end()
