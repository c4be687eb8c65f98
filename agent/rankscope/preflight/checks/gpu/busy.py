"""gpu.busy: somebody else's memory on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import not_measured
from rankscope.preflight.checks.gpu.each import GIB, finding, gpus
from rankscope.preflight.facts.gpu import Gpu
from rankscope.preflight.model import Finding, Fix, Scope, Tier

# A context takes 0.3 to 0.6 GiB, a display server less: above, somebody holds data there.
BUSY_BYTES = GIB


class GpuBusy:
    """No other process holds more than 1 GiB of a GPU's memory, as a dead job's children do."""

    id: ClassVar[str] = "gpu.busy"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail with the processes and the memory that they hold."""
        yield from not_measured(self.id, run, "gpu")
        bad: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu in gpus(run):
            if (gpu.memory_used_bytes or 0) > BUSY_BYTES:
                bad.setdefault(node, []).append((gpu, _words(gpu)))
        for node, found in bad.items():  # each node has processes of its own: each its finding
            one = finding(
                self.id,
                "fail",
                {node: found},
                command="",
                would="'CUDA out of memory' at the first large allocation, or a GPU that is slow",
                wrong_if="the other process ends before the launch, or shares the GPU on purpose",
            )
            yield msgspec.structs.replace(one, fix=(_fix(node, found),))


def _words(gpu: Gpu) -> str:
    used = (gpu.memory_used_bytes or 0) / GIB
    holders = ", ".join(
        f"pid {one.pid}{f' ({one.name[:60]})' if one.name else ''}" for one in gpu.processes[:4]
    )
    return f"{used:.1f} GiB held by {holders or 'processes that are not to be seen from here'}"


def _fix(node: str, found: list[tuple[Gpu, str]]) -> Fix:
    mine = sorted({one.pid for gpu, _ in found for one in gpu.processes if one.name})
    if mine:
        pids = " ".join(map(str, mine))
        return Fix(node=node, command=f"ps -fp {','.join(map(str, mine))}; kill {pids}")
    indices = ",".join(str(gpu.index) for gpu, _ in found)
    command = f"nvidia-smi -i {indices}; sudo fuser -v /dev/nvidia*   # then end what is found"
    return Fix(node=node, command=command, owner="admin")
