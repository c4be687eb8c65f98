"""Which finding explains which: one table of rules, the strongest first.

A finding is grouped under the one that explains it, so that a page shows one incident. A rule needs
more than two kinds that often go together: the same ranks, the right order in time, or both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankscope_server.diagnose.crash.words import ITS_LOG, KNOWN_ERROR
from rankscope_server.findings.finding import SEVERITIES, Finding
from rankscope_server.findings.policy import POLICY

_SLACK_MS = POLICY.order_slack_seconds * 1e3
_NO_MEMORY = re.compile(
    r"SIGKILL|out of memory|OutOfMemory|MemoryError|bad_alloc|oom[-_ ]", re.IGNORECASE
)
_NO_GPU_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|\boom_gpu\b")
_WITHOUT_A_WORD = re.compile(
    r"killed by SIGABRT|exited( with code \d+)? without an exception that was seen"
)
Holds: TypeAlias = Callable[[Finding, Finding], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """`causes` and `effects` are names of kinds, or of detectors for all of their kinds."""

    causes: tuple[str, ...]
    effects: tuple[str, ...]
    why: str  # the condition in words; docs/detectors.md prints it
    holds: Holds  # of (cause, effect)

    def explains(self, cause: Finding, effect: Finding) -> bool:
        """Return whether one finding explains another by this rule; advice explains no fault."""
        return (
            cause is not effect
            and (cause.severity != "info" or effect.severity == "info")
            and _is_of(cause, self.causes)
            and _is_of(effect, self.effects)
            and self.holds(cause, effect)
        )


def group_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of one attempt with `explained_by` set where another explains one.

    A finding that is itself explained hands on what it explains: the key is that of the first
    cause. Of rules that explain in a circle the stronger one counts.
    """
    cause_of: dict[str, Finding] = {}
    for rule in RULES:
        possible = [finding for finding in findings if _is_of(finding, rule.causes)]
        for effect in findings if possible else ():
            if effect.key in cause_of or not _is_of(effect, rule.effects):
                continue
            causes = [c for c in possible if rule.explains(c, effect)]
            causes = [c for c in causes if _root(c, cause_of).key != effect.key]
            if causes:
                cause_of[effect.key] = min(causes, key=_strength)
    return [
        _explained(finding, _root(finding, cause_of))
        if finding.key in cause_of
        else dataclasses.replace(finding, explained_by=None)
        for finding in findings
    ]


def _explained(finding: Finding, cause: Finding) -> Finding:
    """Return a finding that another explains: what to do is said there."""
    return dataclasses.replace(
        finding,
        explained_by=cause.key,
        next=f"See the finding that explains it: {cause.what}",
        next_command="",
    )


def _is_of(finding: Finding, names: tuple[str, ...]) -> bool:
    return finding.kind in names or finding.detector in names


def _root(finding: Finding, cause_of: dict[str, Finding]) -> Finding:
    while finding.key in cause_of:
        finding = cause_of[finding.key]
    return finding


def _strength(cause: Finding) -> tuple[int, float, float, str]:
    return (
        SEVERITIES.index(cause.severity),
        -(cause.cost_throughput_ratio or 0.0),
        cause.onset_ms or 0.0,
        cause.key,
    )


# --- conditions ---------------------------------------------------------------------------------


def _is_sure(cause: Finding) -> bool:
    return cause.severity != "info"


def _same_ranks(cause: Finding, effect: Finding) -> bool:
    return bool(set(cause.ranks) & set(effect.ranks))


def _all_ranks(cause: Finding, effect: Finding) -> bool:
    return bool(effect.ranks) and set(effect.ranks) <= set(cause.ranks)


def _same_time(cause: Finding, effect: Finding) -> bool:
    """Return whether both go on, or both are over."""
    return cause.state == "open" or effect.state == "recovered"


def _not_after(cause: Finding, effect: Finding, steps: int = 1) -> bool:
    """Return whether the cause began no later, by steps; unknown is no."""
    if cause.onset_step is None or effect.onset_step is None:
        return False
    return cause.onset_step - steps <= effect.onset_step


def _before_ms(cause: Finding, effect: Finding) -> float | None:
    """Return by how much the cause began earlier, ms; None where it is not known."""
    if cause.onset_ms is None or effect.onset_ms is None:
        return None
    return effect.onset_ms - cause.onset_ms


def _wrong_call(desync: Finding, stop: Finding) -> bool:
    """What breaks off because of a wrong call does so at once, or when its victims wait."""
    if desync.severity != "critical" or desync.onset_ms is None:
        return False
    after_ms = _before_ms(desync, stop)
    if after_ms is None:
        return stop.group == desync.group
    return -_SLACK_MS <= after_ms <= POLICY.desync_echo_seconds * 1e3


def _wrong_sums(desync: Finding, later: Finding) -> bool:
    return desync.severity == "critical" and _not_after(desync, later)


def _broken_gpu(fault: Finding, end: Finding) -> bool:
    """The driver reported a GPU shortly before its rank ended or hung."""
    after_ms = _before_ms(fault, end)
    return (
        fault.severity == "critical"
        and _same_ranks(fault, end)
        and after_ms is not None
        and -_SLACK_MS <= after_ms <= POLICY.xid_echo_seconds * 1e3
    )


def _reported_after(crash: Finding, fault: Finding) -> bool:
    """A program's own error shows in the driver as well, under a code that is no defect."""
    apart_ms = _before_ms(crash, fault)
    return (
        crash.severity == "critical"
        and fault.severity != "critical"
        and _same_ranks(crash, fault)
        and apart_ms is not None
        and abs(apart_ms) <= POLICY.xid_echo_seconds * 1e3
    )


def _full(memory: Finding, crash: Finding) -> bool:
    return (
        _is_sure(memory)
        and _same_ranks(memory, crash)
        and bool(_NO_MEMORY.search(_text(crash)))
        and (_before_ms(memory, crash) or 0.0) >= 0.0
    )


def _in_fragments(memory: Finding, crash: Finding) -> bool:
    return (
        _is_sure(memory)
        and _same_ranks(memory, crash)
        and bool(_NO_GPU_MEMORY.search(_text(crash)))
    )


def _text(finding: Finding) -> str:
    return "\n".join([finding.what, *(fact.text for fact in finding.evidence)])


def _ended_it(hang: Finding, crash: Finding) -> bool:
    """Only echoes of a hang were seen, or the rank that hung was killed long after it began, or
    ranks that waited for it gave up: a watchdog of NCCL may abort its process without a word."""
    if hang.state != "open":
        return False
    if crash.confidence < POLICY.echo_confidence:
        return True
    after_ms = _before_ms(hang, crash)
    if after_ms is None:
        return False
    if _gave_up(crash) and bool(crash.ranks) and set(crash.ranks) <= set(hang.victims):
        return after_ms >= POLICY.hang_floor_seconds * 1e3
    return (
        "SIGKILL" in crash.what
        and _same_ranks(hang, crash)
        and after_ms >= POLICY.stop_band_seconds * 1e3
    )


def _gave_up(crash: Finding) -> bool:
    """Return whether processes aborted or left with a code, and no output says why."""
    says = any(fact.text.startswith((ITS_LOG, KNOWN_ERROR)) for fact in crash.evidence)
    return not says and bool(_WITHOUT_A_WORD.search(crash.what))


def _left_behind(crash: Finding, hang: Finding) -> bool:
    """A hang is what a crash left behind, not what led to it."""
    if crash.severity != "critical":
        return False
    after_ms = _before_ms(crash, hang)
    return _same_ranks(crash, hang) or (after_ms is not None and after_ms >= -_SLACK_MS)


def _once_more(stop: Finding, loop: Finding) -> bool:
    """The attempt of now failed as those before it."""
    return stop.state == "open" and (not loop.ranks or _all_ranks(stop, loop))


def _does_not_run(stopped: Finding, effect: Finding) -> bool:
    return _is_sure(stopped) and _all_ranks(stopped, effect) and _same_time(stopped, effect)


def _last_steps(stop: Finding, slow: Finding) -> bool:
    """The slow episode is only the last steps before a stop."""
    is_stop = stop.severity == "critical" and (stop.kind != "hang" or stop.state == "open")
    return is_stop and _not_after(stop, slow)


def _odd_batch(batch: Finding, later: Finding) -> bool:
    return (
        _is_sure(batch)
        and _not_after(batch, later)
        and (later.onset_step or 0) <= (batch.onset_step or 0) + POLICY.odd_batch_steps
    )


def _numbers(nan: Finding, later: Finding) -> bool:
    return _is_sure(nan) and _not_after(nan, later) and _same_time(nan, later)


def _other_bits(replica: Finding, later: Finding) -> bool:
    return _not_after(replica, later) and (not later.ranks or _all_ranks(replica, later))


def _slow_ranks(cause: Finding, slow: Finding) -> bool:
    return _is_sure(cause) and _all_ranks(cause, slow) and _same_time(cause, slow)


def _only_they_differ(drift: Finding, effect: Finding) -> bool:
    return (
        _is_sure(drift)
        and bool(drift.ranks)
        and set(drift.ranks) == set(effect.ranks)
        and (drift.severity == "critical" or effect.detector in ("straggler", "balance"))
    )


def _fits_hardware(drift: Finding, slow: Finding) -> bool:
    return drift.kind == "drift" and _only_they_differ(drift, slow)


def _waits_for(slow: Finding, effect: Finding) -> bool:
    return _is_sure(slow) and slow.state == "open" and effect.state == "open"


def _slow_rank_of(slow: Finding, stage: Finding) -> bool:
    return slow.state == "open" and _same_ranks(slow, stage)


def _cost(cause: Finding, slower: Finding) -> bool:
    """The cause costs most of what the whole run lost, and was there when it began."""
    return (
        _waits_for(cause, slower)
        and (slower.kind != "slowdown" or _not_after(cause, slower, POLICY.slowdown_block))
        and (cause.cost_throughput_ratio or 0.0)
        >= POLICY.explained_cost_share * (slower.cost_throughput_ratio or 1.0)
    )


# --- the table ----------------------------------------------------------------------------------

_ENDS = ("crash", "failed_start")
_STOPS = (*_ENDS, "hang")
_GPU_FAULTS = ("xid", "gpu_error", "ecc")
_TRAINING = ("loss_spike", "divergence")
_COSTS = (
    "stopped_process", "straggler", "stalls", "balance", "slow_link", "data-loading",
    "communication", "pipeline", "gpu-health", "memory-growth", "slow_checkpoint",
    "lone_evaluation", "hot_shard",
)  # fmt: skip

RULES: tuple[Rule, ...] = (
    Rule(("desync",), _STOPS, "it stopped within a minute of the wrong call", _wrong_call),
    Rule(_GPU_FAULTS, _STOPS, "a GPU of that rank failed within the minute before", _broken_gpu),
    Rule(("memory_growth",), ("crash",), "the same rank ran out of memory", _full),
    Rule(("fragmentation",), ("crash",), "the same rank ran out of GPU memory", _in_fragments),
    Rule(
        ("hang",), _ENDS,
        "only echoes and time-outs were seen, or the rank that hung was killed a minute later, or "
        "ranks that waited for it aborted or left without a word",
        _ended_it,
    ),
    Rule(
        ("stopped_process",), ("hang", "straggler", "stalls"),
        "the processes of exactly these ranks were stopped", _does_not_run,
    ),
    Rule(_ENDS, ("hang",), "the same rank, or the hang began when it ended", _left_behind),
    Rule(_ENDS, _GPU_FAULTS, "the driver reports the program's own error", _reported_after),
    Rule(_STOPS, ("crash_loop",), "this attempt failed as those before it", _once_more),
    Rule(_STOPS, ("straggler",), "the slow steps are the last ones before the stop", _last_steps),
    Rule(("nan",), (*_TRAINING, "outliers", "replicas"), "NaN came first", _numbers),
    Rule(
        ("replica_drift",), ("nan", *_TRAINING, "outliers"),
        "the replica differed first, of the same ranks", _other_bits,
    ),
    Rule(
        ("corrupt_batch",), _TRAINING,
        f"it follows within {POLICY.odd_batch_steps} steps", _odd_batch,
    ),
    Rule(("corruption",), _TRAINING, "the rank's other numbers came first", _numbers),
    Rule(
        ("desync",), ("replicas", "nan", *_TRAINING),
        "wrong sums came first; nothing above explains it", _wrong_sums,
    ),
    Rule(
        ("drift",), ("desync", "replicas", "corruption", "hang"),
        "critical, and exactly the ranks that differ are those named", _only_they_differ,
    ),
    Rule(
        ("throttle", "ecc", "xid", "gpu_error"),
        ("slow_compute", "thermal_or_power", "unequal_ranks"),
        "the GPU of every slow rank", _slow_ranks,
    ),
    Rule(("memory_growth",), ("page_cache",), "the memory of every slow rank", _slow_ranks),
    Rule(
        ("bad_shard", "slow_epoch_start"), ("straggler",),
        "every slow rank waits for those batches",
        lambda cause, slow: slow.kind == "slow_data" and _slow_ranks(cause, slow),
    ),
    Rule(
        ("drift",), ("slow_compute", "host_contention", "thermal_or_power", "unequal_ranks"),
        "hardware or settings, and exactly the ranks that differ are slow", _fits_hardware,
    ),
    Rule(
        ("stalls",), ("straggler",), "the slow steps are the stalls of the same rank",
        lambda cause, slow: _is_sure(cause) and _same_ranks(cause, slow),
    ),
    Rule(("straggler", "stalls"), ("pipeline",), "a rank of that stage is slow", _slow_rank_of),
    Rule(("straggler",), ("slow_link",), "a rank of that place is slow", _slow_rank_of),
    Rule(("straggler",), ("staleness",), "the gradients of a slow rank are old", _slow_rank_of),
    Rule(("hot_shard",), ("staleness",), "requests wait for the shard", _waits_for),
    Rule(
        ("stopped_process", "straggler", "stalls", "balance", "desync", "hang", "slow_link"),
        ("communication_bound", "communication_advice"),
        "the network waits for those ranks, or for that link", _waits_for,
    ),
    Rule(
        ("host_contention",), ("low_bus_bandwidth",),
        "who sends needs the processors that others took", _waits_for,
    ),
    Rule(
        ("straggler", "data-loading", "hang", "communication_bound"), ("gpu_underuse",),
        "GPUs wait for it", _waits_for,
    ),
    Rule(
        ("throttle", "xid", "gpu_error", "ecc", "straggler"), ("gpu_outlier",),
        "the same rank", lambda cause, odd: _is_sure(cause) and _all_ranks(cause, odd),
    ),
    Rule(("xid", "gpu_error"), ("ecc",), "the same GPU's rank",
         lambda cause, ecc: _is_sure(cause) and _all_ranks(cause, ecc)),
    Rule(("slow_checkpoint",), ("checkpoint_interval",), "the interval follows from the time",
         lambda cause, _: _is_sure(cause)),
    Rule(
        ("data-loading", "stalls", "communication"), ("uneven_work",),
        "it costs at least half of what uneven work does", _cost,
    ),
    Rule(_COSTS, ("regression", "slowdown"), "it costs at least half of what was lost", _cost),
)  # fmt: skip
