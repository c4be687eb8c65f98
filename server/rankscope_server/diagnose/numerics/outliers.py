"""One rank's loss or local gradient norm far from the others': odd data or silent corruption.

The numbers are those before the reduction. Each rank is compared with the
median of the others of its role, less what it usually differs: ranks may read different data.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankscope.wire.formulas import SIGMA_PER_MAD, outlier_cut
from rankscope_server.diagnose.numerics.spikes import history
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    DetectorResult,
    Evidence,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median, others_median

_NAMES = {"gradient_norm_local": "local gradient norm", "loss": "loss"}
_MAX_FINDINGS = 8


@dataclass(frozen=True, slots=True)
class Outlier:
    """A rank and the steps in which it stood out."""

    name: str
    rank: int
    steps: tuple[int, ...]
    z: float  # of the worst
    ratio: float  # of the worst to the median of the others
    cut: float
    num_peers: int


class Outliers:
    """Finds a rank whose loss or gradient, before the reduction, is unlike those of the others."""

    name: ClassVar[str] = "outliers"
    finds: ClassVar[str] = "One rank's loss or gradient, before the reduction, unlike the others'"
    needs: ClassVar[str] = "four ranks of one role"
    silent: ClassVar[str] = "the rank was always different"

    def look(self, window: Window) -> DetectorResult:
        """Return the ranks that stood out among their peers."""
        numbers, policy = window.facts.numbers, window.policy
        roles = roles_of(window)
        if max((len(rows) for rows in roles.values()), default=0) < policy.min_role_size:
            return skipped(
                self,
                f"fewer than {policy.min_role_size} ranks of one role record loss or gradients",
                "train under DistributedDataParallel, or log a loss on every rank",
            )
        counts = {name: len(numbers.steps(name)) for name in _NAMES}
        if max(counts.values()) <= policy.outlier_min_history:
            need = policy.outlier_min_history + 1
            have = max(counts.values())
            return skipped(self, f"needs {need} recorded values, has {have}", "wait")
        found: dict[int, Outlier] = {}
        for name in _NAMES:
            for rows in roles.values():
                for one in outliers_of(window, name, rows):
                    is_one = len(one.steps) < policy.outlier_repeats
                    if is_one and one.ratio < policy.outlier_min_ratio:
                        continue
                    known = found.get(one.rank)
                    if known is None or len(one.steps) > len(known.steps):
                        found[one.rank] = one
        worst = sorted(found.values(), key=lambda one: (-len(one.steps), -one.z))
        findings = [_finding(window, outlier) for outlier in worst[:_MAX_FINDINGS]]
        checked = () if findings else ("loss and gradients before the reduction: no rank apart",)
        return ran(self, findings, checked)


def roles_of(window: Window) -> dict[object, list[int]]:
    """Return the rows of the number table by role."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, row in window.facts.numbers.row_of.items():
        known = window.ranks.get(rank)
        found[(known.role, known.stage) if known else ""].append(row)
    return dict(found)


def outliers_of(window: Window, name: str, rows: list[int]) -> list[Outlier]:
    """Return the ranks of one role that stood out in the newest values of a number."""
    numbers, policy = window.facts.numbers, window.policy
    if len(rows) < policy.min_role_size:
        return []
    head = numbers.head(name)
    if len(head) <= policy.outlier_min_history:
        return []
    recent = [step for step in numbers.steps(name)[-policy.outlier_window :] if step not in head]
    early, late = (_deviation(numbers.matrix(name, steps)[rows]) for steps in (head, recent))
    usual = median(early) if early.shape[1] else np.full(len(rows), np.nan)
    few = np.sum(~np.isnan(early), axis=1) < policy.outlier_min_history
    # While the head still fills, the rest of it is what is compared.
    if not recent:
        early_part = early[:, : policy.outlier_min_history]
        few = np.sum(~np.isnan(early_part), axis=1) < policy.outlier_min_history
        usual, recent = median(early_part), head[policy.outlier_min_history :]
        late = early[:, policy.outlier_min_history :]
        early = early_part
    if not recent:
        return []
    own = SIGMA_PER_MAD * median(np.abs(early - usual[:, None]))
    both = np.abs(np.concatenate([early, late], axis=1) - usual[:, None])
    pooled = SIGMA_PER_MAD * float(median(both.reshape(1, -1))[0])
    sigma = np.fmax(np.fmax(own, pooled), policy.ln_norm_sigma_floor)
    z = (late - usual[:, None]) / sigma[:, None]
    z[few] = np.nan
    cut = outlier_cut(z.size)
    out = z > np.fmax(cut, _tail(early, late, usual, sigma, policy))[:, None]
    # What many ranks do at once is no matter of one rank.
    out[:, np.sum(out, axis=0) > max(1, policy.global_share * len(rows))] = False
    ranks = numbers.ranks
    found = []
    for row in np.flatnonzero(out.any(axis=1)):
        worst = int(np.nanargmax(np.where(out[row], z[row], -np.inf)))
        found.append(
            Outlier(
                name, ranks[rows[row]], tuple(recent[at] for at in np.flatnonzero(out[row])),
                float(z[row, worst]), float(np.exp(late[row, worst])), cut, len(rows) - 1,
            )
        )  # fmt: skip
    return found


def _tail(early: Array, late: Array, usual: Array, sigma: Array, policy: Policy) -> Array:
    """Return the z that each row must exceed: well beyond the farthest that any other row went.

    Losses of a few samples are far from normal, and how far the tail reaches is best read from
    the ranks that are not in question.
    """
    both = np.abs(np.concatenate([early, late], axis=1) - usual[:, None]) / sigma[:, None]
    farthest = np.nanmax(np.nan_to_num(both), axis=1)
    others = [np.delete(farthest, row).max(initial=0.0) for row in range(len(farthest))]
    return policy.outlier_tail_multiple * np.array(others)


def _deviation(values: Array) -> Array:
    """Return ln(value / median of the others), rows x steps; NaN for what is not positive."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(values > 0, np.log(values), np.nan)
    needed = max(3, int(np.ceil(0.5 * len(values))))
    deviation: Array = logs - others_median(logs, needed)
    return deviation


def _job_spiked(window: Window, step: int) -> bool:
    """Return whether the reduced gradient norm, or the loss, of the whole job rose in a step."""
    numbers, policy = window.facts.numbers, window.policy
    for name, limit in (
        ("gradient_norm", policy.spike_norm_z), ("loss", policy.spike_loss_z)
    ):  # fmt: skip
        steps, values, _ = numbers.typical(name)
        if name != "loss":
            values = np.log(np.maximum(values, 1e-300))
        near = np.flatnonzero((steps >= step) & (steps <= step + 1))
        if len(near):
            centre, sigma = history(values[: near[-1] + 1], policy, is_loss=name == "loss")
            if np.any(values[near] > centre[near] + limit * sigma[near]):
                return True
    return False


def _finding(window: Window, outlier: Outlier) -> Finding:
    repeated = len(outlier.steps) >= window.policy.outlier_repeats
    spiked = _job_spiked(window, outlier.steps[0])
    severity: Severity = "warning" if repeated or spiked else "info"
    who = window.who((outlier.rank,))
    word, first = _NAMES[outlier.name], outlier.steps[0]
    numbers = window.facts.numbers
    recent = numbers.steps(outlier.name)[-window.policy.outlier_min_history :]
    is_open = repeated and outlier.steps[-1] >= recent[0]
    how = (
        f"is unlike the others at {len(outlier.steps)} of its newest samples"
        if repeated
        else f"had an odd batch at step {first:,}"
    )
    return window.finding(
        "corruption" if repeated else "corrupt_batch",
        outlier.rank,
        severity=severity,
        is_over=not is_open,
        ranks=(outlier.rank,),
        onset_step=first,
        ended_step=None if is_open else outlier.steps[-1],
        what=f"{who} {how}: its {word} is {outlier.ratio:.1f} times that of its peers",
        why=f"{outlier.z:.0f} sigma from {outlier.num_peers} peers before the reduction, where "
        f"{outlier.cut:.1f} is what chance reaches"
        + ("; the whole job's gradient or loss rose in the same step" if spiked else ""),
        next=f"Run the batch of rank {outlier.rank} at step {first:,} on another rank: the same "
        "number means the data, another one means the GPU, its memory or the host",
        confidence=(
            0.8 if repeated or spiked else 0.6,
            "it repeats"
            if repeated
            else "the whole job felt it"
            if spiked
            else "one sample of one rank",
        ),
        evidence=tuple(
            Evidence(f"Step {step:,}", window.link(outlier.rank, step))
            for step in outlier.steps[:6]
        ),
        ruled_out=("A spike of all ranks: the others stay together in these steps",),
        disproof="The rank is meant to read data unlike that of the others from there on",
    )
