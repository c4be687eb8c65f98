"""What the checks of GPUs share: walking over all of them, and one finding for one cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.facts.gpu import Gpu, GpuFacts
from rankscope.preflight.model import Finding, Fix, Owner, Status

GIB = 1 << 30
_MAX_TOLD = 16


def nodes_with(run: Run) -> Iterator[tuple[str, GpuFacts]]:
    """Yield the nodes that have GPUs."""
    for report in run.present:
        gpu = report.facts.gpu
        if gpu is not None and gpu.gpus:
            yield report.node, gpu


def gpus(run: Run) -> Iterator[tuple[str, Gpu]]:
    """Yield every GPU that NVML gave."""
    for node, facts in nodes_with(run):
        for gpu in facts.gpus:
            yield node, gpu


def finding(
    id: str,
    status: Status,
    bad: Mapping[str, Sequence[tuple[Gpu, str]]],
    *,
    command: str,
    would: str,
    wrong_if: str,
    owner: Owner = "admin",
) -> Finding:
    """Return one finding for all GPUs of all nodes; `command` may hold {index}, of the first."""
    first = next(iter(bad.values()))[0]
    rows = [(node, gpu, what) for node, found in bad.items() for gpu, what in found]
    if len(rows) == 1:
        title = f"{rows[0][0]}: GPU {first[0].index}: {first[1]}"
    else:
        title = f"{listed(bad)}: {len(rows)} GPUs: {first[1]}"
    return Finding(
        id=id,
        status=status,
        nodes=tuple(bad),
        title=title,
        evidence={
            "gpus": [{"node": n, "index": g.index, "uuid": g.uuid, "what": w} for n, g, w in rows]
        },
        told=tuple(f"{n}: GPU {g.index} {g.bus_id}: {w}" for n, g, w in rows[:_MAX_TOLD]),
        fix=tuple(
            Fix(node=node, command=command.format(index=found[0][0].index), owner=owner)
            for node, found in bad.items()
        ),
        would=would,
        wrong_if=wrong_if,
    )
