"""Which runs of experiment trackers this process logs to, so that pages lead there and back.

Only what the tracker's own objects know is read, once for each run; nothing is asked of a server.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.wire.redaction import redact
from rankscope.wire.schema import TRACKER

_MOST_RUNS = 8  # of one tracker in one process


class _Seen:
    """Records each run of a tracker once."""

    def __init__(self, context: Context, tracker: str) -> None:
        self._context, self._tracker = context, tracker
        self._known: set[str] = set()

    def add(self, run: object, **facts: object) -> None:
        """Record a run with what is known of it: see `rankscope.wire.trackers`."""
        name = str(run)
        if name in self._known or len(self._known) >= _MOST_RUNS:
            return
        self._known.add(name)
        fields = {"tracker": self._tracker, "run": name}
        fields |= {key: redact(str(value)) for key, value in facts.items() if value}
        self._context.on_recorder(lambda context: context.event(TRACKER, fields))


def _after(context: Context, owners: list[Any], name: str, take: Callable[..., Any]) -> None:
    """Have `take` see what each call of a function returned, and its arguments."""
    original: Any = getattr(owners[0], name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        take(result, *args)
        return result

    context.patch_all(owners, name, call)


class Wandb:
    """The run of `wandb.init`."""

    name: ClassVar[str] = "wandb"
    needs: ClassVar[str] = "wandb"

    def install(self, context: Context) -> str:
        """Listen to `wandb.init`, and look whether a run is there."""
        import wandb

        seen = _Seen(context, self.name)

        @guarded
        def take(run: Any, *_: Any) -> None:
            if run is None or run.disabled:
                return
            is_offline = run.offline
            seen.add(
                run.id, name=run.name, project=f"{run.entity}/{run.project}".strip("/"),
                page="" if is_offline else run.url, store=os.path.dirname(run.sync_dir),
                mode="offline" if is_offline else "",
            )  # fmt: skip

            if context.settings.server and self.name in context.settings.track:
                context.on_recorder(lambda context: _link(context, run))

        _after(context, [wandb], "init", take)
        take(wandb.run)
        return "wandb.init"


def _link(context: Context, run: Any) -> None:
    """Put the address of our page into the script's run, which no other process can write to.

    W&B queues it, as all that a script logs.
    """
    from rankscope.address import read_address

    assert context.recorder is not None
    server = read_address(context.settings.server).url
    page = f"{server}/runs/{context.recorder.identity.run_id}"
    run.config.update({"rankscope": page}, allow_val_change=True)


class MLflow:
    """The runs of `mlflow.start_run`, and of clients as Lightning's logger uses one."""

    name: ClassVar[str] = "mlflow"
    needs: ClassVar[str] = "mlflow"

    def install(self, context: Context) -> str:
        """Listen to both, and look whether a run is there."""
        import mlflow

        seen = _Seen(context, self.name)

        @guarded
        def take(run: Any, client: Any = None, *_: Any) -> None:
            if run is None:
                return
            store = getattr(client, "tracking_uri", None) or mlflow.get_tracking_uri()
            info = run.info
            page = f"{store.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
            seen.add(
                info.run_id, name=info.run_name, project=info.experiment_id, store=store,
                page=page if store.startswith("http") else "",
            )  # fmt: skip

        @guarded
        def started(run: Any, *_: Any) -> None:
            take(run)

        _after(context, [mlflow.MlflowClient], "create_run", take)
        _after(context, [mlflow, mlflow.tracking.fluent], "start_run", started)
        started(mlflow.active_run())
        return "mlflow.start_run, MlflowClient.create_run"


class TensorBoard:
    """The folders of `torch.utils.tensorboard.SummaryWriter`."""

    name: ClassVar[str] = "tensorboard"
    needs: ClassVar[str] = "torch.utils.tensorboard.writer"

    def install(self, context: Context) -> str:
        """Listen to new writers."""
        from torch.utils.tensorboard.writer import SummaryWriter

        seen = _Seen(context, self.name)

        def made(writer: Any) -> None:
            folder = str(writer.log_dir)
            store = folder if "://" in folder else os.path.abspath(folder)
            seen.add(store, name=os.path.basename(store.rstrip("/")), store=store)

        context.on_new(SummaryWriter, made)
        return "SummaryWriter"


class Trackio:
    """The run of `trackio.init`."""

    name: ClassVar[str] = "trackio"
    needs: ClassVar[str] = "trackio"

    def install(self, context: Context) -> str:
        """Listen to `trackio.init`."""
        import trackio

        seen = _Seen(context, self.name)

        @guarded
        def take(run: Any, *_: Any) -> None:
            seen.add(run.id, name=run.name, project=run.project, page=run.url)

        _after(context, [trackio], "init", take)
        return "trackio.init"


class SwanLab:
    """The run of `swanlab.init`."""

    name: ClassVar[str] = "swanlab"
    needs: ClassVar[str] = "swanlab"

    def install(self, context: Context) -> str:
        """Listen to `swanlab.init`."""
        import swanlab

        seen = _Seen(context, self.name)

        @guarded
        def take(run: Any, *_: Any) -> None:
            if run.mode == "disabled":
                return
            is_online = run.mode == "online"
            seen.add(
                run.id, name=run.name, page=run.url if is_online else "",
                store="" if is_online else os.path.dirname(run.dir),
                mode="" if is_online else run.mode,
            )  # fmt: skip

        _after(context, [swanlab], "init", take)
        return "swanlab.init"


class Comet:
    """The experiment of `comet_ml.start`, or of its classes."""

    name: ClassVar[str] = "comet"
    needs: ClassVar[str] = "comet_ml"

    def install(self, context: Context) -> str:
        """Listen to new experiments, with and without a connection."""
        import comet_ml

        seen = _Seen(context, self.name)

        def made(experiment: Any) -> None:
            is_offline = isinstance(experiment, comet_ml.OfflineExperiment)
            seen.add(
                experiment.get_key(), project=experiment.project_name,
                page="" if is_offline else experiment.url,
                store=getattr(experiment, "offline_directory", ""),
                mode="offline" if is_offline else "",
            )  # fmt: skip

        for kind in (comet_ml.Experiment, comet_ml.OfflineExperiment):
            context.on_new(kind, made)
        return "Experiment, OfflineExperiment"
