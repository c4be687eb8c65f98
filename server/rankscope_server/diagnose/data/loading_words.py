"""What the data-loading detector says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.severity import severity_of
from rankscope_server.findings.text import (
    capital,
    confidence_word,
    ms_text,
    percent_text,
    place_text,
)

if TYPE_CHECKING:
    from rankscope_server.diagnose.data.loading import Stall

_KINDS = {"epoch start": "slow_epoch_start", "bad shard": "bad_shard", "slow worker": "bad_shard"}


def finding_of(window: Window, stall: Stall) -> Finding:
    """Return the finding on a job that waits for data."""
    kind = _KINDS.get(stall.cause, "slow_data")
    lost = stall.lost
    severity: Severity = "warning" if lost >= window.policy.data_warning_share else "info"
    is_recording = window.facts.is_recording
    if is_recording and severity != "info":  # what will come cannot make it surer
        severity = severity_of(lost, window.policy)
    has_onset = stall.pattern is not None or not is_recording
    confidence, reason = _confidence(stall)
    if is_recording and stall.num_steps < window.policy.min_steps:
        confidence = min(confidence, 0.7)
        reason += f"; {stall.num_steps} steps, since when and whether it lasts is not known"
    tag = "+".join(map(str, stall.ranks[:8])) or "all"
    return Finding(
        key=f"{window.attempt}/data-loading/{kind}/{tag}",
        detector="data-loading",
        kind=kind,
        severity=severity,
        attempt=window.attempt,
        ranks=stall.ranks,
        hosts=window.hosts(stall.ranks),
        onset_step=stall.first_step if has_onset else None,
        onset_ms=window.time_ms(stall.first_step) if has_onset else None,
        cost_throughput_ratio=lost,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, lost),
        what=_what(window, stall),
        why=_why(stall),
        next=_next(window, stall),
        next_command="iostat -x 1" if stall.cause == "fetch" else "",
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reason}",
        evidence=_evidence(window, stall),
        ruled_out=("Waits that a slower peer would have caused anyway: they are not counted",),
        would_be_wrong_if="Batches come from somewhere other than a DataLoader, or the step waits "
        "for communication that these waits hide",
        policy_hash=window.policy.hash,
    )


def _what(window: Window, stall: Stall) -> str:
    lost = percent_text(stall.lost)
    if stall.ranks:
        who = capital(place_text(stall.ranks, window.hosts(stall.ranks)))
        return f"{who} now and then waits long for its batch; the job loses {lost} to it"
    if stall.cause == "epoch start":
        return f"Each epoch begins with a wait for data; {lost} of the time goes there"
    return f"The job waits for data: {lost} of each step"


def _why(stall: Stall) -> str:
    least, most = (percent_text(share) for share in stall.range)
    text = f"A step takes {ms_text(stall.step_ms)}, of it {ms_text(stall.wait_ms)} wait for a batch"
    text += f" ({least} to {most} of each of the {stall.num_steps} steps)" * stall.is_short
    loader = stall.loader
    if stall.pattern is not None:
        peak = f"{len(stall.pattern.steps)} waits stand far out"
        every = stall.pattern.every
        text = f"{peak} in {stall.num_steps} steps"
        text += f", one every {every:,} steps" if every else ", at no even distance"
    words = {
        "no workers": "; the loader has no workers, the training process loads by itself",
        "preprocessing": f"; its workers are busy ({stall.busy_cores or 0:.0f} cores), the disks "
        "are not: preprocessing is the limit",
        "fetch": f"; processors wait for disks {percent_text(stall.iowait or 0.0)} of the time: "
        "reading is the limit",
        "slow worker": f"; the loader has {loader.workers if loader else 0} workers, so one of "
        "them is slow: its shard, file or mount",
        "under-prefetch": "; that is all batches that are loaded ahead: it runs empty each time",
        "epoch start": "; workers start anew at each epoch"
        if loader is not None and not loader.persistent
        else "; the workers persist, so it is the new order or a cold cache",
        "bad shard": "; the other ranks do not wait: it is what this rank reads",
        "unknown": "",
    }
    return text + words[stall.cause]


def _next(window: Window, stall: Stall) -> str:
    loader = stall.loader
    if stall.cause == "no workers":
        cores = ", as far as the cores allow" * window.facts.is_recording
        return f"Give the DataLoader num_workers={_workers(window, stall)}{cores}"
    if stall.cause == "preprocessing":
        wanted, local = _workers(window, stall), _local(window)
        if stall.num_cpus and wanted * local > stall.num_cpus:
            return (
                f"{wanted} workers a rank would be needed, more than the {stall.num_cpus} cores "
                "give: preprocess once and store the result, or decode on the GPU"
            )
        return f"Raise num_workers from {loader.workers if loader else 0} to {wanted}"
    if stall.cause == "fetch":
        return "Copy the data to a local disk or read larger files in order; look at iostat"
    if stall.cause == "epoch start" and loader is not None and not loader.persistent:
        return "Give the DataLoader persistent_workers=True"
    if stall.cause == "epoch start":
        return "Time the sampler's shuffle and the data set's start of an epoch"
    if stall.cause == "under-prefetch":
        return f"Raise prefetch_factor from {loader.prefetch if loader else 2}"
    if stall.cause == "bad shard":
        return "Time the files that this rank reads in these steps, against those of another rank"
    if stall.cause == "slow worker":
        return "Time each worker's files; spread the slow ones over all workers"
    return _next_unknown(window)


def _next_unknown(window: Window) -> str:
    if window.facts.is_recording:
        return (
            "Profile the loader's workers, or raise their number by half and record again: if the "
            "share falls they were too few, else the disk is the limit"
        )
    return (
        "Look at what a loader worker does: on the processor it is preprocessing, in a read it is "
        "the disk; py-spy top on one of them decides"
    )


def _local(window: Window) -> int:
    return max((known.local_world_size for known in window.ranks.values()), default=1)


def _workers(window: Window, stall: Stall) -> int:
    """Return how many workers keep up with a step that does not wait, with a tenth to spare."""
    computing = max(stall.step_ms * (1 - stall.lost), 1e-3)
    loader = stall.loader
    if loader is None or loader.workers == 0:
        return max(1, math.ceil(1.1 * stall.wait_ms / computing) + 1)
    return max(loader.workers + 1, math.ceil(1.1 * loader.workers * stall.step_ms / computing))


def _evidence(window: Window, stall: Stall) -> tuple[Evidence, ...]:
    rank = stall.ranks[0] if stall.ranks else (window.steps.ranks or [0])[0]
    facts = [
        Evidence(
            f"Median rank: {percent_text(stall.share)} of the step waits for data over "
            f"{stall.num_steps} steps",
            window.link(rank, stall.first_step),
        )
    ]
    if stall.pattern is not None:
        steps = ", ".join(f"{step:,}" for step in stall.pattern.steps[:8])
        facts.append(Evidence(f"Long waits at steps {steps}", window.link(rank)))
    if stall.loader is not None:
        text = f"DataLoader: num_workers {stall.loader.workers}"
        if stall.loader.workers:
            text += f", prefetch_factor {stall.loader.prefetch}, persistent_workers "
            text += str(stall.loader.persistent)
        facts.append(Evidence(text))
    return tuple(facts)


def _confidence(stall: Stall) -> tuple[float, str]:
    """Return 0.9 where a second signal tells the cause, 0.6 where only the wait is known."""
    if stall.cause == "unknown":
        return 0.6, "the wait is measured, its cause is not"
    if stall.cause in ("preprocessing", "fetch"):
        return 0.9, "the wait and the host's processors agree"
    if stall.pattern is not None and stall.pattern.every:
        return 0.85, "the waits come at the distance that this cause makes"
    return 0.8, "the wait is measured, and the loader's settings explain it"
