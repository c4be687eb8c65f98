"""Where the time of all steps of an attempt went, as sums per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.wire.chunk import Column
from rankscope.wire.schema import STEP_FIRST

_BLOCKED = ("forward_blocked_ns", "backward_blocked_ns", "optimizer_blocked_ns", "other_blocked_ns")
PARTS: tuple[str, ...] = ("productive", "blocked", "data", "checkpoint", "evaluation")


def _no_parts() -> dict[str, int]:
    return dict.fromkeys(PARTS, 0)


@dataclass(slots=True)
class RankTime:
    """Sums in ns, and the edges of what was seen, on the rank's clock."""

    parts: dict[str, int] = field(default_factory=_no_parts)
    first: dict[str, int] = field(default_factory=_no_parts)  # of steps that hold start-up work
    saving: dict[str, int] = field(default_factory=_no_parts)  # of others that hold a checkpoint
    first_start_ns: int = 1 << 62
    last_end_ns: int = 0
    first_step: int = 1 << 62
    last_step: int = 0
    num_steps: int = 0
    num_first: int = 0
    num_saving: int = 0
    evaluating_ns: int = 0  # in evaluation without waiting for others
    first_other_ns: int = 0  # work of the first steps outside of forward, backward and optimizer

    def beyond_usual(self, part: str, *, first: bool) -> float:
        """Return by how much the first steps, or those that save, exceed usual ones, ns."""
        rest = self.num_steps - self.num_first - self.num_saving
        if rest <= 0:
            return 0.0
        usual = (self.parts[part] - self.first[part] - self.saving[part]) / rest
        group, count = (self.first, self.num_first) if first else (self.saving, self.num_saving)
        return max(0.0, group[part] - count * usual)


class TimeSums:
    """By rank. Chunks must be given once; their order does not count."""

    def __init__(self) -> None:
        self.by_rank: dict[int, RankTime] = {}

    def add(self, rank: int, columns: Mapping[str, Column]) -> None:
        """Take one chunk of steps."""

        def ns(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            values = columns.get(name)
            return (
                np.zeros(len(steps), np.int64)
                if values is None
                else np.maximum(np.asarray(values, np.int64), 0)
            )

        steps = np.asarray(columns["step"], np.int64)
        known = self.by_rank.setdefault(rank, RankTime())
        duration, started = ns("duration_ns"), ns("started_ns")
        unproductive = {
            "blocked": sum((ns(name) for name in _BLOCKED), start=np.zeros(len(steps), np.int64)),
            "data": ns("data_ns"),
            "checkpoint": ns("checkpoint_ns"),
            "evaluation": ns("evaluation_ns"),
        }
        is_first = (ns("flags") & STEP_FIRST) != 0
        is_saving = (unproductive["checkpoint"] > 0) & ~is_first
        parts = {"productive": duration - sum(unproductive.values()), **unproductive}
        _add(known.parts, parts)
        if is_first.any():
            _add(known.first, parts, is_first)
            known.num_first += int(is_first.sum())
            known.first_other_ns += int((ns("other_ns") - ns("other_blocked_ns"))[is_first].sum())
        # what a step that evaluates waits outside of its passes, it waits in its evaluation
        evaluating = np.maximum(unproductive["evaluation"] - ns("other_blocked_ns"), 0)
        known.evaluating_ns += int(evaluating.sum())
        if is_saving.any():
            _add(known.saving, parts, is_saving)
            known.num_saving += int(is_saving.sum())
        known.first_start_ns = min(known.first_start_ns, int(started.min()))
        known.last_end_ns = max(known.last_end_ns, int((started + duration).max()))
        known.first_step = min(known.first_step, int(steps.min()))
        known.last_step = max(known.last_step, int(steps.max()))
        known.num_steps += len(steps)


def _add(
    sums: dict[str, int],
    parts: Mapping[str, np.ndarray[tuple[int], np.dtype[np.int64]]],
    where: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None,
) -> None:
    for name, values in parts.items():
        sums[name] += int((values if where is None else values[where]).sum())
