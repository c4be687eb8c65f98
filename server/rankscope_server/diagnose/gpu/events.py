"""Xid errors and their like: what the driver and the kernel say of GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from rankscope.wire.nvidia_codes import xid_words
from rankscope.wire.schema import Event
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    DetectorResult,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.text import place_text

_SECOND_NS = 10**9
_MAX_FINDINGS = 16
Action: TypeAlias = Literal["ignore", "restart", "reset", "drain", "vendor", "unknown"]
_SEVERITY: dict[Action, Severity] = {
    "restart": "warning", "reset": "critical", "drain": "critical", "vendor": "warning",
    "unknown": "info",
}  # fmt: skip
# What an Xid asks for: NVIDIA, "Xid Errors" and its catalogue for Ampere and newer
# (docs.nvidia.com/deploy/xid-errors), which give each code an immediate action. Ours are coarser:
# where the catalogue asks for a workflow, the first step of it. A code that is not here is unknown;
# the words of the codes are in `rankscope.wire.nvidia_codes`.
_CODES: dict[Action, frozenset[int]] = {
    # corrected by the chip, or the trace of an ordinary end
    "ignore": frozenset({45, 121}),
    # the program asked for something that is not there; also contained errors: it alone dies
    "restart": frozenset({8, 11, 13, 31, 32, 43, 68, 69, 94}),
    # works again, or keeps its data right, only after a reset
    "reset": frozenset({38, 46, 48, 61, 62, 63, 92, 95, 109, 110, 119, 120, 136, 140, 143, 154,
                        158}),
    # parts or links that fail again: others should not run there
    "drain": frozenset({57, 64, 74, 79, 144, 145, 146, 147, 148, 149, 155}),
    "vendor": frozenset({56}),
}  # fmt: skip
_ECHOES = frozenset({43, 45})  # channels that end because of another error
_ACTIONS: dict[Action, str] = {
    "ignore": "nothing to do",
    "restart": "restart the program; if it returns with another program, test the GPU",
    "reset": "stop the job on this GPU and reset it (nvidia-smi --gpu-reset), then test it",
    "drain": "drain the node and test the GPU before it takes another job",
    "vendor": "report it to the vendor",
    "unknown": "look the code up in NVIDIA's Xid catalogue",
}


@dataclass(frozen=True, slots=True)
class Burst:
    """One code on one GPU, within ten minutes. `code` 0: no Xid, but what `name` says."""

    host: str
    gpu: str
    code: int
    name: str
    rank: int
    times_ns: tuple[int, ...]
    text: str


class GpuEvents:
    """Finds what the NVIDIA driver and the kernel log say of GPUs: Xid, SXid, ECC, lost GPUs."""

    name: ClassVar[str] = "gpu-events"
    finds: ClassVar[str] = (
        "Xid and SXid errors, lost GPUs, uncorrectable errors as the driver reports them"
    )
    needs: ClassVar[str] = "NVML or the kernel log"
    silent: ClassVar[str] = "an echo of another Xid within a minute; the catalogue says ignore"

    def look(self, window: Window) -> DetectorResult:
        """Return what happened to GPUs during an attempt."""
        machines = window.facts.machines
        if not machines.devices.get("gpu") and not machines.events:
            return skipped(
                self, "no GPU is sampled",
                "on GPU nodes: install the driver's NVML and let the collector read /dev/kmsg",
            )  # fmt: skip
        events = [event for event in machines.events.values() if _during(window, event)]
        bursts = sorted(bursts_of(window, events), key=lambda burst: burst.times_ns[0])
        findings = [_finding(window, burst) for burst in bursts[-_MAX_FINDINGS:]]
        checked = () if findings else ("GPU errors of driver and kernel: none",)
        return ran(self, findings, checked)


def _during(window: Window, event: Event) -> bool:
    """Return whether an event belongs to this attempt: node events carry none themselves."""
    began = min((known.time_ns for known in window.ranks.values()), default=0)
    over = len(window.ended) >= max(window.world_size, 1)
    slack = int(window.policy.stop_band_seconds * _SECOND_NS)
    ended = max((end.time_ns for end in window.ended.values()), default=0) + slack
    return began <= event.time_ns and (not over or event.time_ns <= ended)


def bursts_of(window: Window, events: Iterable[Event]) -> list[Burst]:
    """Return the events that count, one burst per (host, GPU, code) and ten minutes."""
    by_key: dict[tuple[str, str, int, str], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.time_ns, event.name)):
        code = _code(event)
        if event.name in ("xid", "switch xid") and not code:
            continue
        if event.name == "xid" and action_of(code) == "ignore":
            continue
        if event.name in ("oom kill", "hardware error"):
            continue  # of the host, not of a GPU
        gpu = event.fields.get("gpu", event.fields.get("pci", "unknown"))
        by_key[event.fields.get("host", ""), gpu, code, event.name].append(event)
    local = {(known.host, known.local_rank): rank for rank, known in window.ranks.items()}
    found = []
    for (host, gpu, code, name), members in by_key.items():
        known = next((event.rank for event in members if event.rank >= 0), -1)
        rank = known if known >= 0 else window.facts.machines.rank_on(host, gpu, local)
        for times in _bursts(members, window.policy):
            text = next((e.fields["text"] for e in members if "text" in e.fields), "")
            found.append(Burst(host, gpu, code, name, rank, times, text))
    return [burst for burst in found if not _is_echo(burst, found, window)]


def _code(event: Event) -> int:
    text = event.fields.get("number", "")
    return int(text) if text.isdigit() else 0


def _bursts(events: Iterable[Event], policy: Policy) -> list[tuple[int, ...]]:
    """Split the times of events that are alike where ten minutes are between them."""
    burst_ns = policy.xid_burst_seconds * _SECOND_NS
    same_ns = policy.xid_same_seconds * _SECOND_NS
    found: list[list[int]] = []
    for event in events:
        if found and event.time_ns - found[-1][0] <= burst_ns:
            if event.time_ns - found[-1][-1] > same_ns:
                found[-1].append(event.time_ns)
        else:
            found.append([event.time_ns])
    return [tuple(times) for times in found]


def _is_echo(burst: Burst, bursts: list[Burst], window: Window) -> bool:
    """Return whether a channel only ended because of another Xid on that GPU shortly before."""
    slack = int(window.policy.xid_echo_seconds * _SECOND_NS)
    where = (burst.host, burst.gpu)
    return burst.code in _ECHOES and any(
        other.code not in _ECHOES
        and other.code
        and (other.host, other.gpu) == where
        and 0 <= burst.times_ns[0] - other.times_ns[0] <= slack
        for other in bursts
    )  # fmt: skip


def _words_of(burst: Burst) -> tuple[str, Action]:
    if burst.name == "xid":
        return f"Xid {burst.code}: {xid_words(burst.code) or 'not in our table'}", action_of(
            burst.code
        )
    plain: Mapping[str, tuple[str, Action]] = {
        "switch xid": (f"SXid {burst.code} of an NVSwitch", "drain"),
        "gpu ecc error": ("an uncorrectable ECC error", "reset"),
        "gpu does not answer": ("the GPU does not answer any more", "drain"),
    }
    return plain[burst.name]


def _finding(window: Window, burst: Burst) -> Finding:
    words, action = _words_of(burst)
    where = f"GPU {burst.gpu} of {burst.host or 'an unknown host'}"
    ranks = (burst.rank,) if burst.rank >= 0 else ()
    times = len(burst.times_ns)
    who = f" ({place_text(ranks, ())})" if ranks else ""
    return window.finding(
        "xid" if burst.name in ("xid", "switch xid") else "gpu_error",
        f"{burst.host}/{burst.gpu}/{burst.name}/{burst.code}/{burst.times_ns[0] // _SECOND_NS}",
        severity=_SEVERITY[action],
        ranks=ranks,
        hosts=(burst.host,) if burst.host else (),
        onset_ms=burst.times_ns[0] / 1e6,
        what=f"{where}{who}: {words}",
        why=f"Reported {times} time{'s' * (times > 1)} within ten minutes by the driver"
        + (f": {burst.text}" if burst.text else ""),
        next=f"{_ACTIONS[action][:1].upper()}{_ACTIONS[action][1:]}",
        command=f"nvidia-smi -q -i {burst.gpu}" if burst.gpu.isdigit() else "nvidia-smi",
        confidence=(
            0.95 if action != "unknown" else 0.6,
            "the driver says so itself"
            if action != "unknown"
            else "the driver says so, the code is not in our table",
        ),
        evidence=(burst.text or words,),
        ruled_out=("An echo: no other Xid of this GPU came shortly before",)
        if burst.code in _ECHOES
        else (),
        disproof="The GPU is not used by this job",
    )


def action_of(code: int) -> Action:
    """Return what to do about an Xid."""
    return next((action for action, codes in _CODES.items() if code in codes), "unknown")
