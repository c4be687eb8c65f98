"""The parts of the log: which run is in which, and which worker stores which.

All batches of a run are in one partition, in order. A worker takes what `assign` gives it, once its
lease of it is free; all workers compute the same from who is up.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

from rankscope_server.store.leases import Held, LeasesOf
from rankscope_server.store.shared_leases import SharedLeases


def partition_of(run_id: str, num_partitions: int) -> int:
    """Return the partition that the batches of a run are in."""
    return zlib.crc32(run_id.encode()) % num_partitions


def lease_of(partition: int) -> str:
    """Return the name of the lease of a partition."""
    return f"partition {partition}"


def assign(num_partitions: int, workers: Sequence[str]) -> dict[str, set[int]]:
    """Return the partitions of each worker: as many for each, but for one.

    Where a worker comes or goes few others move: each partition has an order of workers of its own.
    """
    given: dict[str, set[int]] = {worker: set() for worker in workers}
    if not workers:
        return given
    most = -(-num_partitions // len(workers))
    for partition in range(num_partitions):
        for worker in sorted(workers, key=lambda name: _weight(partition, name)):
            if len(given[worker]) < most:
                given[worker].add(partition)
                break
    return given


def _weight(partition: int, worker: str) -> bytes:
    return hashlib.blake2b(f"{partition} {worker}".encode(), digest_size=8).digest()


class Share:
    """The partitions that this process is to have, as things are; from any thread."""

    def __init__(self, leases: SharedLeases, num_partitions: int) -> None:
        self._leases, self._num_partitions = leases, num_partitions
        self._known: tuple[tuple[str, ...], set[int]] = ((), set())

    def has(self, partition: int) -> bool:
        """Return whether a partition is to be this process's, once its lease is free."""
        workers, ours = self._known
        if workers != self._leases.workers:
            workers = self._leases.workers
            ours = assign(self._num_partitions, workers).get(self._leases.owner, set())
            self._known = workers, ours
        return partition in ours

    def lease_of_run(self, run_id: str) -> Held | None:
        """Return the lease of a run's partition, if it is to be this process's and is."""
        partition = partition_of(run_id, self._num_partitions)
        return self._leases.hold(lease_of(partition)) if self.has(partition) else None


class LeasesOfRuns(LeasesOf):
    """The leases that an analysis asks for, one for each run: that of its partition is as good.

    So who stores a run looks at it, and both move together.
    """

    def __init__(self, leases: SharedLeases, share: Share) -> None:
        super().__init__(leases, ())
        self._share = share

    def hold(self, name: str, run_id: str = "") -> Held | None:
        """Return the lease of the run's partition while this process has it."""
        return self._share.lease_of_run(run_id)

    def release(self, name: str) -> None:
        """Keep it: other runs are in the same partition."""
