"""Gradients applied to parameters that have moved on, and shards that all wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankscope_server.diagnose.parameter_server.ages import ages_of
from rankscope_server.diagnose.parameter_server.bottleneck import bottleneck_finding
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    DetectorResult,
    Evidence,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import capital, percent_text, ranks_text
from rankscope_server.observe.version_table import Shard


@dataclass(frozen=True, slots=True)
class Stale:
    """How old one worker's gradients are, in versions; exact counts over the kept steps."""

    rank: int
    num_gradients: int
    p50: int
    p95: int
    most: int
    mean: float
    mismatches: int  # gradients whose backward used other weights than their forward
    first_bad_step: int | None  # first one beyond the limit
    loss_correlation: float | None


class Staleness:
    """Finds gradients applied too many versions late, hot shards, servers that hold all up."""

    name: ClassVar[str] = "staleness"
    finds: ClassVar[str] = (
        "Gradients applied too many versions late, hot parameter shards, servers that all workers "
        "wait for"
    )
    needs: ClassVar[str] = (
        "version stamps and totals of shards, see [version stamps](#version-stamps)"
    )
    silent: ClassVar[str] = "there are none; over NCCL nothing is said of waits"

    def look(self, window: Window) -> DetectorResult:
        """Return the workers whose gradients are stale, and the hot shards."""
        table = window.facts.versions
        if not table.rows and not table.shards:
            return skipped(
                self, "no version stamps",
                "only jobs with parameter servers or unflushed pipelines need them: instrument "
                "push and pull, rankscope.log_metrics(step, version_read=..., version_applied=...)",
            )  # fmt: skip
        workers = [stale for rank in sorted(table.rows)
                   if (stale := stale_of(window, rank)) is not None]  # fmt: skip
        findings = _stale_findings(window, workers) + _mismatch(window, workers)
        findings += _hot_shards(window)
        bottleneck = bottleneck_finding(window)
        findings += [] if bottleneck is None else [bottleneck]
        most = max((worker.most for worker in workers), default=0)
        checked = () if findings else (f"staleness: at most {most} versions",)
        return ran(self, findings, checked)


def bound_of(window: Window) -> int | None:
    """Return the declared bound: 0 synchronous, s of SSP, -1 asynchronous; None not declared."""
    return max(window.facts.versions.bound.values(), default=None)


def stale_of(window: Window, rank: int) -> Stale | None:
    """Return how old a worker's gradients are; None where no gradient has both versions."""
    ages = ages_of(window.facts.versions.rows[rank])
    if ages is None:
        return None
    beyond = np.flatnonzero(ages.ages > _limit(window))
    return Stale(
        rank, len(ages.ages), ages.p50, ages.p95, ages.most, ages.mean, ages.mismatches,
        int(ages.steps[beyond[0]]) if len(beyond) else None,
        _correlation(window, rank, ages.steps, ages.ages),
    )  # fmt: skip


def _limit(window: Window) -> int:
    """Return the age that a gradient may have: the bound, else the number of workers."""
    bound = bound_of(window)
    return bound if bound is not None and bound >= 0 else len(window.facts.versions.rows)


def _correlation(window: Window, rank: int, steps: Array, age: Array) -> float | None:
    numbers = window.facts.numbers
    row = numbers.row_of.get(rank)
    kept = set(numbers.steps("loss"))
    if row is None:
        return None
    pairs = [
        (float(one), float(numbers.column("loss", int(step))[row]))
        for step, one in zip(steps.tolist(), age.tolist(), strict=True)
        if step in kept
    ]
    known = np.array([pair for pair in pairs if not np.isnan(pair[1])])
    least = window.policy.correlated_values
    if len(known) < least or np.ptp(known[:, 0]) == 0 or np.ptp(known[:, 1]) == 0:
        return None
    return float(np.corrcoef(known.T)[0, 1])


def _severity(window: Window, stale: Stale) -> Severity | None:
    """Return how bad a worker's staleness is, None where it is as it should be."""
    bound = bound_of(window)
    if bound is not None and bound >= 0:
        return "critical" if stale.most > bound else None
    workers = len(window.facts.versions.rows)
    if stale.p95 > workers or stale.mean > window.policy.stale_mean_multiple * (workers - 1):
        return "warning"
    return None


def _stale_findings(window: Window, workers: Sequence[Stale]) -> list[Finding]:
    bad = [(worker, severity) for worker in workers
           if (severity := _severity(window, worker)) is not None]  # fmt: skip
    if not bad:
        return []
    worst, severity = max(bad, key=lambda pair: (pair[0].p95, pair[0].mean))
    ranks = tuple(sorted(stale.rank for stale, _ in bad))
    everyone = len(ranks) == len(workers) and len(workers) > 1
    bound = bound_of(window)
    limit = (
        "the job is meant to be synchronous" if bound == 0
        else f"the bound is {bound}" if bound is not None and bound > 0
        else f"{len(workers)} equal workers expect {len(workers) - 1}"
    )  # fmt: skip
    others = [worker.p50 for worker in workers if worker.rank not in ranks]
    who = "Every worker" if everyone else window.who(ranks)
    verb = "applies" if everyone or len(ranks) == 1 else "apply"
    why = f"{limit}; median {worst.p50}, p95 {worst.p95}, most {worst.most} of "
    why += f"{worst.num_gradients} gradients of rank {worst.rank}"
    if others:
        why += f"; the other workers' median is {int(np.median(others))}"
    if worst.loss_correlation is not None:
        why += f"; its correlation with the loss is {worst.loss_correlation:.2f}"
    first = min((stale.first_bad_step for stale, _ in bad if stale.first_bad_step is not None),
                default=None)  # fmt: skip
    return [
        window.finding(
            "staleness",
            "+".join(map(str, ranks[:8])),
            severity=severity,
            ranks=() if everyone else ranks,
            hosts=() if everyone else window.hosts(ranks),
            onset_step=first,
            what=f"{who} {verb} gradients {worst.p95} versions old (p95)",
            why=capital(why),
            next="Raise the bound knowingly, or lower it for all; where one worker alone is late, "
            "look at its pull: its link, its host, the shard it waits for",
            confidence=(0.95, "versions are counted, not estimated"),
            evidence=tuple(
                Evidence(
                    f"Rank {stale.rank}: median {stale.p50}, p95 {stale.p95}, most {stale.most}",
                    window.link(stale.rank, stale.first_bad_step),
                )
                for stale, _ in bad[:4]
            ),
            disproof="The stamps are taken at other moments than the pull and the apply",
        )
    ]


def _mismatch(window: Window, workers: Sequence[Stale]) -> list[Finding]:
    """Return the finding on gradients whose forward and backward used different weights."""
    bad = [worker for worker in workers if worker.mismatches]
    if not bad:
        return []
    ranks = tuple(stale.rank for stale in bad)
    count, total = sum(o.mismatches for o in bad), sum(o.num_gradients for o in bad)
    return [
        window.finding(
            "staleness",
            "mismatch",
            severity="warning",
            ranks=ranks,
            what=f"Backward passes on {ranks_text(ranks)} use other weights than their forward "
            "passes",
            why=f"{count:,} of {total:,} gradients: the weights moved on in between, so they are "
            "gradients of no function; with weight stashing there are none",
            next="Keep the weights of each microbatch until its backward pass (weight stashing)",
            confidence=(0.95, "versions are counted, not estimated"),
            disproof="The versions given are of different shards",
        )
    ]


def _hot_shards(window: Window) -> list[Finding]:
    """Return the shards with far more than their share of requests or bytes, if workers wait."""
    shards, policy = window.facts.versions.shards, window.policy
    shares = {what: _shares(shards, what) for what in ("requests", "bytes")}
    known = shares["requests"] or shares["bytes"]
    if len(known) < 2:
        return []
    durations = window.steps.get("duration")
    elapsed = float(np.nansum(median(durations, 0))) / 1e3 if durations.size else 0.0
    found = []
    for number in sorted(known):
        what = max(shares, key=lambda name: shares[name].get(number, 0.0))
        share = shares[what].get(number, 0.0)
        queue = shards[number].total("queue_seconds")
        # Of two shards none can have twice its share: there half-way to all of it counts.
        fair = 1 / len(known)
        if share <= min(policy.hot_shard_multiple * fair, (1 + fair) / 2):
            continue
        workers = max(1, len(window.facts.versions.rows))
        held = queue / elapsed / workers if queue and elapsed else 0.0
        if queue is not None and held < policy.cost_silent_ratio:
            continue  # busy, but no rank waits for it
        size = shards[number].total("bytes")
        sizes = [one for shard in shards.values() if (one := shard.total("bytes")) is not None]
        heavy = f"; it moves {size / np.mean(sizes):.1f} times the mean bytes" if size else ""
        waits = f"; workers wait {percent_text(held)} of the time in its queue" if queue else ""
        found.append(
            window.finding(
                "hot_shard",
                f"shard/{number}",
                severity="info" if queue is None or held < policy.cost_info_ratio else "warning",
                cost=held if queue else None,
                what=f"Parameter shard {number} takes {percent_text(share)} of all {what}",
                why=f"{len(known)} shards would take {percent_text(fair)} each{waits}{heavy}",
                next=f"Split what is on shard {number}, for example a large embedding by rows",
                confidence=(
                    0.9 if queue else 0.6,
                    "load and queue are both counted"
                    if queue
                    else "load is counted, whether a worker waits is not known",
                ),
                disproof="The shard runs on a server that is as much faster",
            )
        )
    return found


def _shares(shards: Mapping[int, Shard], what: str) -> dict[int, float]:
    """Return each shard's share of all requests, or of all bytes; nothing where none is known."""
    totals = {number: shard.total(what) for number, shard in shards.items()}
    known = {number: value for number, value in totals.items() if value is not None}
    total = sum(known.values())
    return {number: value / total for number, value in known.items()} if total > 0 else {}
