"""Which transfers a slow part of the network touches: an adapter, a host, a leaf, a group."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tests.simulator.job import Fault, Job

Array = np.ndarray


@lru_cache(maxsize=256)
def slowed(job: Job, fault: Fault, kind: str) -> Array:
    """Return by how much the collectives of one kind of group take longer, by place of a rank."""
    factor = np.ones((job.pipeline, job.data, job.tensor))
    for name, ranks in job.groups.items():
        if name.split("-")[0] == kind and is_touched(job, fault, ranks, name):
            factor[tuple(np.array([job.place(rank) for rank in ranks]).T)] = 1 + fault.size
    return factor


@lru_cache(maxsize=256)
def slowed_pairs(job: Job, fault: Fault, source: int, stage: int) -> Array:
    """Return by how much what `stage` receives from stage `source` takes longer, data x tensor."""
    found = np.ones((job.data, job.tensor))
    for data in range(job.data):
        for tensor in range(job.tensor):
            pair = (int(job.grid[source, data, tensor]), int(job.grid[stage, data, tensor]))
            if is_touched(job, fault, pair, f"pp-{data}-{tensor}"):
                found[data, tensor] = 1 + fault.size
    return found


def is_touched(job: Job, fault: Fault, ranks: tuple[int, ...], name: str) -> bool:
    """Return whether the transfers of some ranks cross what is slow."""
    if fault.group:
        return name.startswith(fault.group)
    hosts = {rank // job.ranks_per_host for rank in ranks}
    if len(hosts) < 2:
        return False
    if fault.rank >= 0:
        return fault.rank in ranks
    if fault.host >= 0:
        return fault.host in hosts
    return fault.leaf in {host // job.hosts_per_leaf for host in hosts}
