"""Batches that the script itself found damaged, by a checksum of its own.

A script that checks its data says so: `rankscope.log_metrics(step, corrupt_batches=total)`, the
number of damaged batches that this rank has drawn since its start.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Evidence, Finding, ran, skipped

_NAME = "corrupt_batches"


class CorruptBatches:
    """Finds ranks that drew batches which the script's own check calls damaged."""

    name: ClassVar[str] = "corrupt-batches"
    finds: ClassVar[str] = "Ranks that drew batches which the script's own check calls damaged"
    needs: ClassVar[str] = "`rankscope.log_metrics(step, corrupt_batches=total)`"
    silent: ClassVar[str] = "the script reports no check"

    def look(self, window: Window) -> DetectorResult:
        """Return one finding for each rank that drew damaged data."""
        numbers = window.facts.numbers
        steps = numbers.steps(_NAME)
        if not steps:
            return skipped(
                self,
                "the script reports no check of its batches",
                "check them, and say rankscope.log_metrics(step, corrupt_batches=total)",
            )
        totals = numbers.matrix(_NAME, steps)
        findings = [
            _finding(window, rank, steps, totals[row])
            for rank, row in sorted(numbers.row_of.items())
            if row < len(totals) and np.nan_to_num(totals[row]).max(initial=0.0) > 0
        ]
        return ran(self, findings, () if findings else ("batches: every checksum was right",))


def _finding(window: Window, rank: int, steps: list[int], totals: np.ndarray) -> Finding:
    count = int(np.nanmax(totals))
    bad = [step for step, total in zip(steps, totals, strict=True) if total > 0]
    first, last = bad[0], steps[int(np.nanargmax(totals))]
    who = window.who((rank,))
    times = "a damaged batch" if count == 1 else f"{count:,} damaged batches"
    return window.finding(
        "corrupt_batch",
        rank,
        detector="corrupt-batches",
        severity="warning",
        ranks=(rank,),
        onset_step=first,
        what=f"{who} drew {times} since step {first:,}",
        why=f"The script's own check of the data failed, last at step {last:,}; the other ranks' "
        "batches were right at these steps unless they are named too",
        next="Read the same samples from their source and on another host: equal bytes mean the "
        "source is damaged, other bytes mean the disk, the cache or the memory of this host",
        command="dmesg -T | grep -iE 'i/o error|ecc|edac' | tail",
        confidence=(0.9, "a checksum differs"),
        evidence=(Evidence(f"Step {first:,}", window.link(rank, first)),),
        disproof="The checksums are those of another version of the data set",
    )
