"""TensorBoard: a folder of events beside those of the script, a run of its own on the pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rankscope.trackers import PREFIX, Conclusion, StepNumbers, Target, TrackerError

_SUFFIX = ".rankscope"  # of files that are ours
_MS_PER_S = 1e3


class TensorBoardFolder:
    """The folder `rankscope` in that of the script's writer, else one below `runs`."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    written_to = 0  # what was written before is replaced: TensorBoard shows steps once

    def __init__(self, target: Target) -> None:
        self._target = target
        own = target.store or target.own.get("store", "")
        if "://" in own:
            raise TrackerError(f"{own} is no folder: name one by --store")
        folder = Path(own) / "rankscope" if own else Path("runs") / target.run_id
        if own and not Path(own).is_dir():
            raise TrackerError(f"there is no folder {own} on {os.uname().nodename}: use --store")
        for old in folder.glob(f"events.*{_SUFFIX}"):
            old.unlink()
        self._writer = EventFileWriter(str(folder), filename_suffix=_SUFFIX)
        self.place = str(folder.absolute())

    def write(self, steps: Sequence[StepNumbers]) -> None:
        """Write a scalar for each number."""
        for one in steps:
            values = [Summary.Value(tag=name, simple_value=v) for name, v in one.values.items()]
            self._add(one.step, one.time_ms, values)
        self._writer.flush()

    def conclude(self, conclusion: Conclusion) -> None:
        """Write it as a text, and what is lost as a scalar."""
        text = conclusion.markdown(self._target).encode()
        numbers = conclusion.numbers().items()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
        values.append(
            Summary.Value(
                tag=f"{PREFIX}verdict",
                metadata=create_summary_metadata("", ""),
                tensor=TensorProto(dtype=DT_STRING, string_val=[text]),
            )
        )
        self._add(conclusion.step, conclusion.time_ms, values)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, time_ms: int, values: list[Summary.Value]) -> None:
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time_ms / _MS_PER_S, step=step, summary=summary))
