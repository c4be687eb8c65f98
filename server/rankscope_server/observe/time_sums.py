"""Where the time of all steps of an attempt went, as sums per rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.wire.schema import STEP_FIRST
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.rank_steps import RankSteps

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

    def add(self, taken: RankSteps) -> None:
        """Take steps of ranks."""

        def ns(name: str) -> Array:
            values = taken.columns.get(name)
            if values is None:
                return np.zeros(len(steps), np.int64)
            return np.maximum(np.asarray(values, np.int64), 0)

        def sums(values: Array, where: Array | None = None) -> list[int]:
            counted = values if where is None else np.where(where, values, 0)
            found: list[int] = np.add.reduceat(counted.astype(np.int64), taken.begins).tolist()
            return found

        steps = np.asarray(taken.columns["step"], np.int64)
        duration, started = ns("duration_ns"), ns("started_ns")
        parts = {
            "blocked": sum((ns(name) for name in _BLOCKED), start=np.zeros(len(steps), np.int64)),
            "data": ns("data_ns"),
            "checkpoint": ns("checkpoint_ns"),
            "evaluation": ns("evaluation_ns"),
        }
        parts = {"productive": duration - sum(parts.values()), **parts}
        is_first = (ns("flags") & STEP_FIRST) != 0
        is_saving = (parts["checkpoint"] > 0) & ~is_first
        # what a step that evaluates waits outside of its passes, it waits in its evaluation
        evaluating = np.maximum(parts["evaluation"] - ns("other_blocked_ns"), 0)
        counts = {
            "num_first": sums(is_first),
            "num_saving": sums(is_saving),
            "num_steps": sums(np.ones(len(steps))),
            "evaluating_ns": sums(evaluating),
            "first_other_ns": sums(ns("other_ns") - ns("other_blocked_ns"), is_first),
        }
        least = {
            "first_start_ns": np.minimum.reduceat(started, taken.begins).tolist(),
            "first_step": np.minimum.reduceat(steps, taken.begins).tolist(),
        }
        most = {
            "last_end_ns": np.maximum.reduceat(started + duration, taken.begins).tolist(),
            "last_step": np.maximum.reduceat(steps, taken.begins).tolist(),
        }
        groups = {"parts": None, "first": is_first, "saving": is_saving}
        by_part = {
            (group, part): sums(values, where)
            for group, where in groups.items()
            if where is None or where.any()
            for part, values in parts.items()
        }
        for place, rank in enumerate(taken.ranks.tolist()):
            known = self.by_rank.setdefault(rank, RankTime())
            for (group, part), found in by_part.items():
                getattr(known, group)[part] += found[place]
            for name, found in counts.items():
                setattr(known, name, getattr(known, name) + found[place])
            for name, found in least.items():
                setattr(known, name, min(getattr(known, name), found[place]))
            for name, found in most.items():
                setattr(known, name, max(getattr(known, name), found[place]))
