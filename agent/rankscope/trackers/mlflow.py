"""MLflow: numbers and tags in the script's own run, else in a run of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from mlflow import MlflowClient
from mlflow.entities import Metric, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_TAG_VAL_LENGTH

from rankscope.trackers import Conclusion, StepNumbers, Target

_LAST_STEP, _RUN = "rankscope.last_step", "rankscope.run"


class MLflowRun:
    """A run of MLflow, which takes numbers of several processes."""

    failures: ClassVar[tuple[type[Exception], ...]] = (MlflowException,)

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = MlflowClient(target.store or target.own.get("store") or None)
        name = target.into or target.own.get("run") or os.environ.get("MLFLOW_RUN_ID", "")
        self._is_own = not name
        found = self._client.get_run(name) if name else self._run_of_its_own()
        self._id = found.info.run_id
        self.written_to = int(found.data.tags.get(_LAST_STEP, 0))
        self.place = f"run {self._id} of {self._client.tracking_uri}"

    def _run_of_its_own(self) -> Any:
        """Return the run that was made for this one, a new one the first time."""
        name = self._target.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "rankscope")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        wanted = f"tags.`{_RUN}` = '{self._target.run_id}'"
        found = self._client.search_runs([number], wanted, max_results=1)
        tags = {_RUN: self._target.run_id}
        return found[0] if found else self._client.create_run(
            number, run_name=self._target.name, tags=tags
        )  # fmt: skip

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write numbers of steps, and up to which one that was done."""
        metrics = [
            Metric(name, value, one.time_ms, one.step)
            for one in steps
            for name, value in one.values.items()
        ]
        for at in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self._id, metrics[at : at + MAX_METRICS_PER_BATCH])
        if steps:
            self._client.set_tag(self._id, _LAST_STEP, str(steps[-1].step))

    def conclude(self, conclusion: Conclusion) -> None:
        """Write it as tags, which the list of runs shows and finds."""
        tags = [
            RunTag(f"rankscope.{name}", text[:MAX_TAG_VAL_LENGTH])
            for name, text in conclusion.texts(self._target).items()
        ]
        numbers = conclusion.numbers().items()
        metrics = [Metric(n, value, conclusion.time_ms, conclusion.step) for n, value in numbers]
        self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def close(self, *, failed: bool) -> None:
        """End a run of its own; the script's run is the script's to end."""
        if self._is_own:
            status = RunStatus.FAILED if failed else RunStatus.FINISHED
            self._client.set_terminated(self._id, RunStatus.to_string(status))
