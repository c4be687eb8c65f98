"""What is written of a run into the experiment trackers that people use: one module for each.

Never in a training process: `rankscope track` writes, in a process of its own. Each module imports
its tracker, so only the one that is asked for is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from rankscope.wire.trackers import TITLES

PREFIX = "rankscope/"  # of every number, so that they stand together beside those of the script
LOST = f"{PREFIX}lost_throughput_ratio"


class TrackerError(Exception):
    """A tracker cannot be written to; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """The run that is written, and where to. What is empty was not said."""

    run_id: str
    name: str
    page: str  # address of the run's page
    own: Mapping[str, str] = field(default_factory=dict)  # of the tracker's run: see FIELDS
    into: str = ""  # id of the tracker's run
    store: str = ""  # a folder, or the address of the tracker's server
    project: str = ""

    @property
    def other_name(self) -> str:
        """Return what a run beside that of the script is called."""
        return f"{self.own.get('name') or self.name} (rankscope)"


class StepNumbers(NamedTuple):
    """Numbers of one step of the job, by the names that they have in the tracker."""

    step: int
    time_ms: int  # since the epoch
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What is concluded of a run as of a step."""

    step: int
    time_ms: int
    status: str
    answer: str  # in one sentence
    kind: str  # of the finding, empty where there is none
    lost_ratio: float | None  # of the throughput; None: not known

    def texts(self, target: Target) -> dict[str, str]:
        """Return it as words by name, with the way back."""
        return {
            "run": target.run_id, "page": target.page, "status": self.status,
            "verdict": self.kind, "answer": self.answer,
        }  # fmt: skip

    def numbers(self) -> dict[str, float]:
        """Return what of it is a number, if it is known."""
        return {} if self.lost_ratio is None else {LOST: self.lost_ratio}

    def markdown(self, target: Target) -> str:
        """Return it as a paragraph with a link."""
        return f"**{self.answer}**\n\n[{target.run_id}]({target.page}), {self.status}"


class Tracker(Protocol):
    """A run of a tracker that is written to.

    What a tracker raises of its own is one of `failures`.
    """

    failures: ClassVar[tuple[type[Exception], ...]]
    place: str  # where people find it
    written_to: int  # the last step that was written before; 0: none

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write numbers of steps, in their order."""

    def conclude(self, conclusion: Conclusion) -> None:
        """Write what is concluded, in place of what was before."""

    def close(self, *, failed: bool) -> None:
        """Write what is left. `failed`: the run did not end well."""


_CLASSES = {
    "mlflow": "MLflowRun",
    "wandb": "WandbRun",
    "tensorboard": "TensorBoardFolder",
    "trackio": "TrackioRun",
    "swanlab": "SwanLabRun",
    "comet": "CometExperiment",
}
_PACKAGES = {"mlflow": "mlflow-skinny", "comet": "comet-ml"}  # those with another name


def load(tracker: str) -> type[Any]:
    """Return the class that writes to a tracker. Raises TrackerError where it is not installed."""
    try:
        module = importlib.import_module(f"{__name__}.{tracker}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rankscope"):
            raise
        package = _PACKAGES.get(tracker, tracker)
        raise TrackerError(
            f"{TITLES[tracker]} is not installed here ({error.name}): pip install {package}"
        ) from error
    found: type[Any] = getattr(module, _CLASSES[tracker])
    return found
