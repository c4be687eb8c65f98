"""Whether the steps of ranks can be compared, and which ranks with which."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from rankscope_server.detectors.finding import NOT_HERE
from rankscope_server.detectors.window import Window


def lack_of(window: Window) -> tuple[str, str] | None:
    """Return (reason, remedy) if there is too little to compare."""
    table, policy = window.steps, window.policy
    if window.world_size == 1:
        return "one rank has nobody to be compared with", NOT_HERE
    if not table.num_steps:
        return "no step has ended yet", "wait, or call rankscope.step() once a step"
    steps = table.num_steps + table.dropped_steps
    if steps < policy.min_steps:
        return f"needs {policy.min_steps} steps, has {steps}", "wait"
    if len(table.ranks) < 2:
        return "only one rank reports steps", "attach the agent to all ranks"
    recent = table.get("own", max(0, table.num_steps - policy.recent_steps))
    missing = float(np.mean(np.isnan(recent)))
    if missing > policy.max_missing_share:
        return (
            f"{100 * missing:.0f} % of the steps of the reporting ranks are missing",
            "see the losses under coverage",
        )
    return None


def roles_of(window: Window) -> dict[int, Hashable]:
    """Return the role of each rank: ranks of different roles are never compared."""
    return {
        rank: (known.role, known.stage, known.num_stages, known.num_microbatches)
        for rank, known in window.ranks.items()
    }
