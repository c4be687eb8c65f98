"""GPUs that throttle, whose memory fails, that are unlike the others, or idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median, others_median
from rankscope_server.findings.text import percent_text, place_text
from rankscope_server.observe.machine_table import (
    HEALTH_COLUMNS,
    STRETCH_SECONDS,
    Device,
    MachineTable,
)

_MAX_FINDINGS = 16
# floors under the scatter of a fleet: what sensors and rounding make by themselves
_FLOORS = {
    "sm_clock_mhz": (0.01, 0.0), "power_watts": (0.03, 0.0), "temperature_celsius": (0.0, 2.0),
    "utilization_ratio": (0.0, 0.05),
}  # fmt: skip  # share of the median, absolute
_METRICS = {
    "sm_clock_mhz": ("SM clock", "MHz"), "power_watts": ("power", "W"),
    "temperature_celsius": ("temperature", "C"), "utilization_ratio": ("utilisation", ""),
    "sm_ratio": ("activity of the multiprocessors", ""),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Throttle:
    """A GPU whose clocks are held down. Ratios are shares of the last five minutes."""

    device: Device
    share: float
    clock_loss: float  # share by which its clock is below its peers'; NaN without peers
    celsius: float
    is_power_cap: bool


@dataclass(frozen=True, slots=True)
class FailingMemory:
    """A GPU whose memory shows errors. `what` names the rule."""

    device: Device
    what: str
    count: float
    peers: float
    is_certain: bool


@dataclass(frozen=True, slots=True)
class UnusualGpu:
    """A GPU that is unlike the others in several ways at once."""

    device: Device
    metrics: tuple[tuple[str, float, float], ...]  # name, its value, median of the others


class GpuHealth:
    """Finds GPUs that throttle, have failing memory, differ from others or have little to do."""

    name: ClassVar[str] = "gpu-health"
    finds: ClassVar[str] = (
        "GPUs that throttle, whose memory fails, that are unlike the others, that have little to do"
    )
    needs: ClassVar[str] = "GPU samples"
    silent: ClassVar[str] = "the GPU is idle; what a throttle costs is not seen in the steps: info"

    def look(self, window: Window) -> DetectorResult:
        """Return what is wrong with the GPUs of a job."""
        machines, policy = window.facts.machines, window.policy
        if not machines.devices.get("gpu"):
            return skipped(
                self, "no GPU is sampled", "on GPU nodes: install the driver's NVML (libnvidia-ml)"
            )
        hosts = {known.host for known in window.ranks.values()}
        findings: list[Finding] = []
        findings += [throttle_finding(window, throttle) for throttle in throttles(machines, policy)
                     if throttle.device[0] in hosts]  # fmt: skip
        findings += [ecc_finding(window, failing) for failing in worn(machines, policy)
                     if failing.device[0] in hosts]  # fmt: skip
        findings += [outlier_finding(window, outlier) for outlier in outliers(machines, policy)
                     if outlier.device[0] in hosts]  # fmt: skip
        activity = low_activity(machines, policy)
        if activity is not None and window.steps.num_steps and _uses_gpus(window):
            findings.append(activity_finding(window, *activity))
        count = len(machines.devices["gpu"])
        loud = any(finding.severity != "info" for finding in findings)
        checked = () if loud else (f"health of {count} GPUs: clocks, memory errors, temperature",)
        return ran(self, findings[:_MAX_FINDINGS], checked)


def _uses_gpus(window: Window) -> bool:
    """Return whether any rank is known to compute on a GPU: jobs on CPUs leave them idle."""
    facts = window.facts
    return bool(facts.machines.gpu_of_rank) or "cuda_allocated_bytes" in facts.memory.names()


def _busy(machines: MachineTable, policy: Policy, stretches: int) -> Array:
    """Return which GPUs worked in each of the newest stretches, GPUs x stretches."""
    _, use = machines.means("utilization_ratio", stretches)
    with np.errstate(invalid="ignore"):
        busy: Array = use > policy.gpu_idle_ratio
    return busy


def throttles(machines: MachineTable, policy: Policy) -> list[Throttle]:
    """Return the GPUs whose clocks are held down by heat or power, or by a power cap.

    Heat and power brakes count where the clock is also below that of busy peers of its kind.
    """
    stretches = int(policy.throttle_seconds // STRETCH_SECONDS)
    busy = _busy(machines, policy, stretches)

    def seen(name: str) -> Array:
        values = machines.means(name, stretches)[1]
        values[~busy] = np.nan
        return values

    devices = machines.means("throttled", 1)[0]
    hot, capped, clock, heat = map(
        seen, ("throttled", "power_capped", "sm_clock_mhz", "temperature_celsius")
    )
    known = np.sum(~np.isnan(hot), axis=1) >= policy.throttle_min_stretches
    hot_share, cap_share = _mean(hot), _mean(capped)
    loss = _clock_loss(machines, devices, median(clock), policy)
    found = []
    for row in np.flatnonzero(known):
        is_hot = hot_share[row] > policy.throttle_share and loss[row] > policy.throttle_clock_share
        is_capped = cap_share[row] > policy.throttle_share
        if is_hot or is_capped:
            share = hot_share[row] if is_hot else cap_share[row]
            celsius = float(np.nanmax(np.append(heat[row], np.nan_to_num(heat[row]))))
            found.append(
                Throttle(devices[row], float(share), float(loss[row]), celsius, not is_hot)
            )
    return found


def _mean(values: Array) -> Array:
    known = np.sum(~np.isnan(values), axis=1)
    mean: Array = np.nansum(values, axis=1) / np.maximum(known, 1)
    return mean


def _clock_loss(
    machines: MachineTable, devices: list[Device], clock: Array, policy: Policy
) -> Array:
    """Return by how much each GPU's clock is below the median of its kind; NaN without peers."""
    at = HEALTH_COLUMNS.index("sm_clock_max_mhz")
    kinds = np.array([
        float(machines.health[device].last[at]) if device in machines.health else -1.0
        for device in devices
    ])  # fmt: skip
    loss = np.full(len(devices), np.nan)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        if len(rows) >= policy.min_role_size:
            peers = others_median(clock[rows][:, None], 3)[:, 0]
            with np.errstate(invalid="ignore", divide="ignore"):
                loss[rows] = 1.0 - clock[rows] / peers
    return loss


def worn(machines: MachineTable, policy: Policy) -> list[FailingMemory]:
    """Return the GPUs whose memory has errors that came up while the job ran."""
    devices = list(machines.health)
    if not devices:
        return []
    first = np.stack([machines.health[one].first for one in devices])
    last = np.stack([machines.health[one].last for one in devices])
    rise = np.where((first >= 0) & (last >= 0), np.maximum(last - first, 0.0), 0.0)
    columns = {name: at for at, name in enumerate(HEALTH_COLUMNS)}
    corrected = rise[:, columns["ecc_corrected"]]
    peers = (
        others_median(corrected[:, None], 3)[:, 0] if len(devices) > 3 else np.zeros_like(corrected)
    )
    found = []
    for row, device in enumerate(devices):
        if rise[row, columns["ecc_uncorrected"]] > 0:
            count = float(rise[row, columns["ecc_uncorrected"]])
            found.append(FailingMemory(device, "uncorrectable errors", count, 0.0, True))
        elif last[row, columns["remap_failed"]] > 0:
            found.append(FailingMemory(device, "row remapping failed", 1.0, 0.0, True))
        elif last[row, columns["remap_pending"]] > 0 or last[row, columns["retire_pending"]] > 0:
            found.append(FailingMemory(device, "a bad row waits for a reset", 1.0, 0.0, False))
        elif corrected[row] > policy.ecc_rate_multiple * max(float(np.nan_to_num(peers[row])), 1.0):
            found.append(FailingMemory(device, "many corrected errors", float(corrected[row]),
                              float(np.nan_to_num(peers[row])), False))  # fmt: skip
    return found


def outliers(machines: MachineTable, policy: Policy) -> list[UnusualGpu]:
    """Return GPUs far from the others on at least two metrics, again and again."""
    stretches = policy.fleet_stretches
    busy = _busy(machines, policy, stretches)
    if len(busy) < policy.fleet_min_gpus:
        return []
    devices = machines.means("sm_clock_mhz", 1)[0]
    far: dict[str, Array] = {}
    shown: dict[str, tuple[Array, Array]] = {}
    for name, (relative, absolute) in _FLOORS.items():
        values = machines.means(name, stretches)[1]
        values[~busy] = np.nan
        centre = median(values, 0)
        spread = SIGMA_PER_MAD * median(np.abs(values - centre), 0)
        scale = np.fmax(spread, np.fmax(relative * np.abs(centre), absolute))
        with np.errstate(invalid="ignore"):
            far[name] = np.abs(values - centre) > policy.fleet_z * scale
        shown[name] = values[:, -1], centre
    votes = np.sum(list(far.values()), axis=0) >= 2
    always = votes.all(axis=1)
    return [
        UnusualGpu(devices[row], tuple(
            (name, float(values[row]), float(centre[-1]))
            for name, (values, centre) in shown.items() if far[name][row, -1]
        ))
        for row in np.flatnonzero(always)
    ]  # fmt: skip


def low_activity(machines: MachineTable, policy: Policy) -> tuple[str, float] | None:
    """Return (metric, mean) if the GPUs of the job did little over ten minutes; else None."""
    stretches = int(policy.low_activity_seconds // STRETCH_SECONDS)
    for name in ("sm_ratio", "utilization_ratio"):
        _, values = machines.means(name, stretches)
        if np.mean(~np.isnan(values)) < 0.9:
            continue
        mean = float(np.median(_mean(values)))
        return (name, mean) if mean < policy.low_activity_ratio else None
    return None


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


def throttle_finding(window: Window, throttle: Throttle) -> Finding:
    """Return the finding on a GPU whose clocks are held down."""
    where, ranks = _place(window, throttle.device)
    cost = None if throttle.is_power_cap else _cost(window, ranks)
    policy = window.policy
    severity = severity_of_cost(cost or 0.0, policy)
    reason = "its power cap" if throttle.is_power_cap else "heat or a power brake"
    behind = (
        "" if np.isnan(throttle.clock_loss) or throttle.clock_loss <= 0
        else f", SM clock {percent_text(throttle.clock_loss)} below its peers"
    )  # fmt: skip
    heat = f", {throttle.celsius:.0f} C" if throttle.celsius > 0 else ""
    lost = f"; the job loses {percent_text(cost)}" if cost is not None else ""
    return window.finding(
        "power_cap" if throttle.is_power_cap else "throttle",
        f"throttle/{throttle.device[0]}/{throttle.device[1]}",
        severity=severity,
        ranks=ranks,
        hosts=(throttle.device[0],),
        cost=cost,
        what=f"{where} runs slower because of {reason}",
        why=f"The driver holds its clocks down {percent_text(throttle.share)} of the last 5 min"
        f"{behind}{heat}{lost}",
        next=f"Raise the power limit on {throttle.device[0]} if its site allows it"
        if throttle.is_power_cap
        else f"Check cooling and power of {throttle.device[0]}; drain it if it returns",
        command=f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {throttle.device[1]}",
        confidence=(
            0.9 if cost is not None else 0.75,
            "the driver gives the reason and the rank is slow"
            if cost is not None
            else "the driver gives the reason; what it costs is not seen in the steps",
        ),
        disproof="The clocks of this GPU were set lower on purpose",
    )


def ecc_finding(window: Window, memory: FailingMemory) -> Finding:
    """Return the finding on a GPU whose memory has errors."""
    where, ranks = _place(window, memory.device)
    peers = f", its peers {memory.peers:.0f}" if memory.what == "many corrected errors" else ""
    return window.finding(
        "ecc",
        f"ecc/{memory.device[0]}/{memory.device[1]}",
        severity="critical" if memory.is_certain else "warning",
        ranks=ranks,
        hosts=(memory.device[0],),
        what=f"The memory of {where} is failing: {memory.what}",
        why=f"Its counter rose by {memory.count:.0f} while the job ran{peers}"
        if "errors" in memory.what
        else "The driver says so in its count of remapped rows",
        next=f"Save a checkpoint, drain {memory.device[0]} and reset the GPU; numbers computed "
        "since the error may be wrong"
        if memory.is_certain
        else f"Reset the GPU of {memory.device[0]} at the next pause, and test its memory",
        command=f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {memory.device[1]}",
        confidence=(
            0.95 if memory.is_certain else 0.8,
            "counted by the hardware"
            if memory.is_certain
            else "counted by the hardware, not fatal by itself",
        ),
        disproof="The counters were reset or read from another GPU in between",
    )


def outlier_finding(window: Window, gpu: UnusualGpu) -> Finding:
    """Return the finding on a GPU that is unlike the others."""
    where, ranks = _place(window, gpu.device)
    facts = []
    for name, value, usual in gpu.metrics:
        word, unit = _METRICS[name]
        digits = 2 if unit == "" else 0
        facts.append(f"{word} {value:.{digits}f} {unit}".rstrip() + f" (others {usual:.{digits}f})")
    return window.finding(
        "gpu_outlier",
        f"outlier/{gpu.device[0]}/{gpu.device[1]}",
        ranks=ranks,
        hosts=(gpu.device[0],),
        what=f"{where} is unlike the other GPUs",
        why="; ".join(facts),
        next=f"Compare it with its neighbours: cooling and power on {gpu.device[0]}",
        command=f"nvidia-smi -q -i {gpu.device[1]}",
        confidence=(0.6, "several sensors agree, the steps show nothing yet"),
        disproof="This GPU is meant to do other work than the rest",
    )


def activity_finding(window: Window, name: str, mean: float) -> Finding:
    """Return the finding on GPUs that have little to do, with the cause that is known."""
    causes = [
        finding for finding in window.before.values()
        if finding.state == "open"
        and finding.kind in ("slow_data", "slow_epoch_start", "slow_link", "hang")
    ]  # fmt: skip
    worst = max(causes, key=lambda cause: cause.cost_throughput_ratio or 0.0, default=None)
    return window.finding(
        "gpu_underuse",
        "activity",
        what=f"The GPUs have little to do: {_METRICS[name][0]} {percent_text(mean)} over 10 min",
        why=f"The cause is known: {worst.what}"
        if worst is not None
        else "No finding explains it: the host may launch too slowly, or batches are small",
        next=worst.next
        if worst is not None
        else "Profile some steps and look for gaps between kernels",
        command="" if worst is not None else "rankscope ask profile",
        confidence=(0.8 if worst is not None else 0.6, "measured by the GPUs themselves"),
        disproof="The job evaluates, saves or debugs most of the time",
    )
