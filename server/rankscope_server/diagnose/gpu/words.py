"""What the detector of GPU health says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.severity import severity_of
from rankscope_server.findings.text import percent_text, place_text

if TYPE_CHECKING:
    from rankscope_server.diagnose.gpu.health import Odd, Throttle, Worn
    from rankscope_server.observe.machine_table import Device

_METRICS = {
    "sm_clock_mhz": ("SM clock", "MHz"), "power_watts": ("power", "W"),
    "temperature_celsius": ("temperature", "C"), "utilization_ratio": ("utilisation", ""),
    "sm_ratio": ("activity of the multiprocessors", ""),
}  # fmt: skip


def _place(window: Window, device: Device) -> tuple[str, tuple[int, ...]]:
    host, gpu = device
    local = {(known.host, known.local_rank): rank for rank, known in window.ranks.items()}
    rank = window.facts.machines.rank_on(host, gpu, local)
    ranks = (rank,) if rank >= 0 else ()
    who = f" ({place_text(ranks, ())})" if ranks else ""
    return f"GPU {gpu} of {host}{who}", ranks


def _cost(window: Window, ranks: tuple[int, ...]) -> float | None:
    """Return what the straggler detector says that these ranks cost the job."""
    costs = [
        finding.cost_throughput_ratio
        for finding in window.before.values()
        if finding.detector == "straggler" and finding.state == "open"
        and set(finding.ranks) & set(ranks) and finding.cost_throughput_ratio is not None
    ]  # fmt: skip
    return max(costs, default=None)


def throttle_finding(window: Window, one: Throttle) -> Finding:
    """Return the finding on a GPU whose clocks are held down."""
    where, ranks = _place(window, one.device)
    cost = None if one.is_power_cap else _cost(window, ranks)
    policy = window.policy
    severity = severity_of(cost or 0.0, policy)
    reason = "its power cap" if one.is_power_cap else "heat or a power brake"
    behind = (
        "" if np.isnan(one.clock_loss) or one.clock_loss <= 0
        else f", SM clock {percent_text(one.clock_loss)} below its peers"
    )  # fmt: skip
    heat = f", {one.celsius:.0f} C" if one.celsius > 0 else ""
    lost = f"; the job loses {percent_text(cost)}" if cost is not None else ""
    return Finding(
        key=f"{window.attempt}/gpu-health/throttle/{one.device[0]}/{one.device[1]}",
        detector="gpu-health",
        kind="power_cap" if one.is_power_cap else "throttle",
        severity=severity,
        attempt=window.attempt,
        ranks=ranks,
        hosts=(one.device[0],),
        cost_throughput_ratio=cost,
        cost_rank_hours_per_day=None if cost is None
        else rank_hours_per_day(window.world_size, cost),
        what=f"{where} runs slower because of {reason}",
        why=f"The driver holds its clocks down {percent_text(one.share)} of the last 5 min"
        f"{behind}{heat}{lost}",
        next=f"Raise the power limit on {one.device[0]} if its site allows it"
        if one.is_power_cap else
        f"Check cooling and power of {one.device[0]}; drain it if it returns",
        next_command=f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {one.device[1]}",
        confidence=0.9 if cost is not None else 0.75,
        confidence_text="high: the driver gives the reason and the rank is slow" if cost is not None
        else "medium: the driver gives the reason; what it costs is not seen in the steps",
        would_be_wrong_if="The clocks of this GPU were set lower on purpose",
        policy_hash=policy.hash,
    )  # fmt: skip


def ecc_finding(window: Window, one: Worn) -> Finding:
    """Return the finding on a GPU whose memory has errors."""
    where, ranks = _place(window, one.device)
    peers = f", its peers {one.peers:.0f}" if one.what == "many corrected errors" else ""
    return Finding(
        key=f"{window.attempt}/gpu-health/ecc/{one.device[0]}/{one.device[1]}",
        detector="gpu-health",
        kind="ecc",
        severity="critical" if one.is_certain else "warning",
        attempt=window.attempt,
        ranks=ranks,
        hosts=(one.device[0],),
        what=f"The memory of {where} is failing: {one.what}",
        why=f"Its counter rose by {one.count:.0f} while the job ran{peers}"
        if "errors" in one.what else "The driver says so in its count of remapped rows",
        next=f"Save a checkpoint, drain {one.device[0]} and reset the GPU; numbers computed since "
        "the error may be wrong" if one.is_certain else
        f"Reset the GPU of {one.device[0]} at the next pause, and test its memory",
        next_command=f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {one.device[1]}",
        confidence=0.95 if one.is_certain else 0.8,
        confidence_text="high: counted by the hardware" if one.is_certain
        else "medium: counted by the hardware, not fatal by itself",
        would_be_wrong_if="The counters were reset or read from another GPU in between",
        policy_hash=window.policy.hash,
    )  # fmt: skip


def outlier_finding(window: Window, one: Odd) -> Finding:
    """Return the finding on a GPU that stands apart from the others."""
    where, ranks = _place(window, one.device)
    facts = []
    for name, value, usual in one.metrics:
        word, unit = _METRICS[name]
        digits = 2 if unit == "" else 0
        facts.append(f"{word} {value:.{digits}f} {unit}".rstrip() + f" (others {usual:.{digits}f})")
    return Finding(
        key=f"{window.attempt}/gpu-health/outlier/{one.device[0]}/{one.device[1]}",
        detector="gpu-health",
        kind="gpu_outlier",
        severity="info",
        attempt=window.attempt,
        ranks=ranks,
        hosts=(one.device[0],),
        what=f"{where} is unlike the other GPUs",
        why="; ".join(facts),
        next=f"Compare it with its neighbours: cooling and power on {one.device[0]}",
        next_command=f"nvidia-smi -q -i {one.device[1]}",
        confidence=0.6,
        confidence_text="medium: several sensors agree, the steps show nothing yet",
        would_be_wrong_if="This GPU is meant to do other work than the rest",
        policy_hash=window.policy.hash,
    )  # fmt: skip


def activity_finding(window: Window, name: str, mean: float) -> Finding:
    """Return the finding on GPUs that have little to do, with the cause that is known."""
    causes = [
        finding for finding in window.before.values()
        if finding.state == "open"
        and finding.kind in ("slow_data", "slow_epoch_start", "slow_link", "hang")
    ]  # fmt: skip
    worst = max(causes, key=lambda one: one.cost_throughput_ratio or 0.0, default=None)
    return Finding(
        key=f"{window.attempt}/gpu-health/activity",
        detector="gpu-health",
        kind="gpu_underuse",
        severity="info",
        attempt=window.attempt,
        what=f"The GPUs have little to do: {_METRICS[name][0]} {percent_text(mean)} over 10 min",
        why=f"The cause is known: {worst.what}" if worst is not None
        else "No finding explains it: the host may launch too slowly, or batches are small",
        next=worst.next if worst is not None
        else "Profile some steps and look for gaps between kernels",
        next_command="" if worst is not None else "rankscope ask profile",
        confidence=0.8 if worst is not None else 0.6,
        confidence_text="medium: measured by the GPUs themselves",
        would_be_wrong_if="The job evaluates, saves or debugs most of the time",
        policy_hash=window.policy.hash,
    )  # fmt: skip
