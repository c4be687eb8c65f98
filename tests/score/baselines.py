"""What published rules say of the same records: whom they accuse.

NVRx: a rank's score is the best median time over its own; below 0.75 it is a straggler
(nvidia-resiliency-ext, straggler detection, default threshold). Greyhound: of groups at the same
position, one at 1.2 times the median or more is suspected, after a change of 10 % (its public
code). z > 3: three standard deviations above the mean of the ranks.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from rankscope_server.analysis.state import RunState
from tests.simulator.job import Job

STEPS = 20  # the newest, whose median counts
NVRX, GREYHOUND, CHANGE, SIGMAS = 0.75, 1.2, 1.1, 3.0
NAMES = ("NVRx best/own < 0.75", "Greyhound group > 1.2x", "z > 3")


def baselines(state: RunState, job: Job) -> dict[str, tuple[int, ...]]:
    """Return whom each rule accuses by the self time of the newest steps of the newest attempt."""
    attempt = state._newest()
    if attempt is None or attempt.steps.num_steps < 2 * STEPS:
        return dict.fromkeys(NAMES, ())
    table = attempt.steps
    own = np.asarray(table.get("own"), float)
    now = np.nanmedian(own[:, -STEPS:], axis=1)
    before = np.nanmedian(own[:, 5 : 5 + STEPS], axis=1)
    ranks = np.array(table.ranks)
    return {
        NAMES[0]: _named(ranks, np.nanmin(now) / now < NVRX),
        NAMES[1]: _greyhound(job, dict(zip(ranks.tolist(), now.tolist(), strict=True)),
                             dict(zip(ranks.tolist(), before.tolist(), strict=True))),
        NAMES[2]: _named(ranks, (now - np.nanmean(now)) > SIGMAS * np.nanstd(now)),
    }  # fmt: skip


def _named(ranks: np.ndarray, guilty: np.ndarray) -> tuple[int, ...]:
    return tuple(sorted(ranks[guilty].tolist()))


def _greyhound(job: Job, now: dict[int, float], before: dict[int, float]) -> tuple[int, ...]:
    """Return the members of suspected groups: the rule names a group, not a rank of it."""
    kinds: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name, ranks in job.groups.items():
        kinds[name.split("-")[0]].append(ranks)
    if job.tensor == job.pipeline == 1:
        kinds["rank"] = [(rank,) for rank in range(job.num_ranks)]
    accused: set[int] = set()
    for groups in kinds.values():
        if len(groups) < 3:
            continue
        pace = [max(now.get(rank, 0.0) for rank in ranks) for ranks in groups]
        for ranks, mine in zip(groups, pace, strict=True):
            was = max(before.get(rank, 0.0) for rank in ranks)
            if mine >= GREYHOUND * float(np.median(pace)) and mine >= CHANGE * was:
                accused |= set(ranks)
    return tuple(sorted(accused))
