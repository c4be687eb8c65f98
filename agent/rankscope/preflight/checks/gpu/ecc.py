"""gpu.ecc: memory of a GPU that is known to be bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import not_measured
from rankscope.preflight.checks.gpu.each import finding, gpus
from rankscope.preflight.facts.gpu import Gpu
from rankscope.preflight.model import Finding, Scope, Tier


class GpuEcc:
    """No GPU has uncorrected memory errors, rows to be remapped, or pages to be retired.

    Counts since the driver was loaded; corrected errors and finished remappings are normal wear.
    """

    id: ClassVar[str] = "gpu.ecc"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail, apart for what a reset mends and what it does not."""
        yield from not_measured(self.id, run, "gpu")
        resets: dict[str, list[tuple[Gpu, str]]] = {}
        broken: dict[str, list[tuple[Gpu, str]]] = {}
        for node, gpu in gpus(run):
            if gpu.rows_failed:
                broken.setdefault(node, []).append((gpu, "remapping of a bad memory row failed"))
            elif what := _to_be_reset(gpu):
                resets.setdefault(node, []).append((gpu, what))
        if broken:
            yield finding(
                self.id,
                "fail",
                broken,
                command="take the node out of service: the GPU at index {index} must be replaced",
                would="the job dies of a memory error (Xid 48, 94, 95), sooner or later",
                wrong_if="the GPU was replaced and the counters are old",
                owner="provider",
            )
        if resets:
            yield finding(
                self.id,
                "fail",
                resets,
                command="sudo nvidia-smi --gpu-reset -i {index}   # with no process on it",
                would="the job dies of a memory error (Xid 48, 94, 95), or computes nonsense",
                wrong_if="the errors happened in a row that has been remapped since",
            )
        silent = {node for node, gpu in gpus(run) if gpu.ecc is False}
        if silent:
            title = f"ECC is switched off on {len(silent)} nodes: memory errors are not seen"
            yield Finding(id=self.id, status="skipped", nodes=tuple(sorted(silent)), title=title)


def _to_be_reset(gpu: Gpu) -> str:
    if gpu.ecc_uncorrected:
        return f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
    if gpu.rows_pending:
        return "a bad memory row waits for a reset to be remapped"
    if gpu.pages_pending:
        return "a bad memory page waits for a reset to be retired"
    return ""
