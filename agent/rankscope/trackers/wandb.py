"""Weights & Biases: a run of its own beside the script's, as W&B takes one writer for a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import wandb

from rankscope.trackers import PREFIX, Conclusion, StepNumbers, Target


class WandbRun:
    """A run in the same project, whose configuration names the script's and the page."""

    failures: ClassVar[tuple[type[Exception], ...]] = (wandb.errors.Error,)

    def __init__(self, target: Target) -> None:
        self._target = target
        own = target.into or target.own.get("run") or os.environ.get("WANDB_RUN_ID", "")
        entity, _, project = (target.project or target.own.get("project", "")).rpartition("/")
        mode = target.own.get("mode") or os.environ.get("WANDB_MODE") or None
        beside = Path(target.own.get("store", ""))
        folder = target.store or (str(beside.parent) if beside.is_dir() and beside.name else None)
        self._run: Any = wandb.init(
            id=f"{own or target.run_id}-rankscope", name=target.other_name, job_type="rankscope",
            project=project or None, entity=entity or None, dir=folder, mode=mode,
            resume=None if mode == "offline" else "allow", notes=target.page,
            config={"rankscope": {"run": target.run_id, "page": target.page, "of": own}},
            settings=wandb.Settings(
                console="off", silent=True, symlink=False, disable_git=True, save_code=False,
                x_disable_stats=True, x_disable_meta=True,
            ),
        )  # fmt: skip
        self.written_to = max(self._run.starting_step - 1, 0)
        self.place = str(self._run.sync_dir if self._run.offline else self._run.url)

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write numbers of steps."""
        for one in steps:
            self._run.log(one.values, step=one.step)

    def conclude(self, conclusion: Conclusion) -> None:
        """Write it into the summary, which the table of runs shows."""
        texts = conclusion.texts(self._target) | conclusion.numbers()
        self._run.summary.update(
            {name if name.startswith(PREFIX) else PREFIX + name: it for name, it in texts.items()}
        )

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=int(failed))
