"""lim.shm: shared memory for loader workers and for NCCL within a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier

MIB = 1 << 20
# What Docker gives a container unless told otherwise: a batch of 32 pictures of 224 x 224 in
# float32 takes 18 MiB, and every worker keeps two.
TOO_SMALL_BYTES = 64 * MIB
WANTED_PER_RANK_BYTES = 1024 * MIB


class LimShm:
    """Shared memory in /dev/shm is large enough for loader workers and for NCCL.

    Loader workers hand every batch over through it; NCCL uses it between the GPUs of a node.
    """

    id: ClassVar[str] = "lim.shm"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail at 64 MiB or less with loader workers, warn below 1 GiB for each rank."""
        yield from not_measured(self.id, run, "limits")
        found: dict[Status, dict[str, tuple[int, int]]] = {"fail": {}, "warn": {}}
        missing: list[str] = []
        for report in run.present:
            limits = report.facts.limits
            if limits is None:
                continue
            total, free = limits.shm_total_bytes, limits.shm_free_bytes
            if total is None or free is None:
                missing.append(report.node)
            elif free <= TOO_SMALL_BYTES and run.options.num_loader_workers:
                found["fail"][report.node] = (total, free)
            elif free < WANTED_PER_RANK_BYTES * run.nproc(report.node):
                found["warn"][report.node] = (total, free)
        for status, bad in found.items():
            if bad:
                yield self._finding(run, status, bad)
        if missing:
            title = f"{listed(missing)}: no /dev/shm"
            yield Finding(id=self.id, status="unknown", nodes=tuple(missing), title=title)

    def _finding(self, run: Run, status: Status, bad: dict[str, tuple[int, int]]) -> Finding:
        node, (_, free) = min(bad.items(), key=lambda item: item[1][1])
        wanted = WANTED_PER_RANK_BYTES * run.nproc(node)
        wants = {name: WANTED_PER_RANK_BYTES * run.nproc(name) for name in bad}
        is_small = all(total < wants[name] for name, (total, _) in bad.items())
        title = f"{listed(bad)}: {free // MIB} MiB free in /dev/shm, {wanted // MIB} MiB wanted"
        return Finding(
            id=self.id,
            status=status,
            nodes=tuple(bad),
            title=title,
            evidence={
                "shm_total_bytes": {name: total for name, (total, _) in bad.items()},
                "shm_free_bytes": {name: left for name, (_, left) in bad.items()},
            },
            told=tuple(
                f"{name}: {left // MIB} of {total // MIB} MiB free"
                for name, (total, left) in bad.items()
            ),
            fix=tuple(_fix(run, name, is_small) for name in bad),
            would=(
                "loader workers die with 'Bus error' or 'unable to allocate shared memory(shm)'"
                + ("; NCCL fails on its shared memory segment" if run.backend == "nccl" else "")
            ),
            wrong_if="the job uses no loader workers and no NCCL, or starts in another container",
        )


def _fix(run: Run, node: str, is_small: bool) -> Fix:
    wanted_gib = -(-WANTED_PER_RANK_BYTES * run.nproc(node) // (1 << 30))
    host = run.reports[node].facts.host
    container = host.container if host is not None else ""
    if not is_small:
        return Fix(node=node, command="ls -lhS /dev/shm | head   # remove what dead jobs left")
    if container in ("docker", "podman"):
        command = f"{container} run --shm-size={wanted_gib}g ...   # or --ipc=host"
        return Fix(node=node, command=command)
    if container == "kubernetes":
        command = "mount an emptyDir with medium: Memory at /dev/shm in the pod"
        return Fix(node=node, command=command)
    command = f"sudo mount -o remount,size={wanted_gib}G /dev/shm"
    return Fix(node=node, command=command, owner="admin")
