"""What to do next with a run: exclude hosts, restart, stop, wait, nothing, or not known. Pure.

Who acts on advice may stop a healthy job, so each rule errs on the side of doing nothing, and
"not known" is never "nothing to do".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rankscope_server.findings.text import percent_text

Action: TypeAlias = Literal[
    "exclude_host", "restart_from_checkpoint", "stop", "wait", "nothing", "unknown"
]

# A second signal agrees from here on (findings: "high"): with less no host is ever excluded, and
# no job restarted.
LEAST_CONFIDENCE = 0.85
# Of a job's hosts, at most so many are excluded at once: where more seem bad, their number says
# that it is the network, the storage or the program.
MOST_HOSTS_RATIO = 0.25
LOOP_KIND = "crash_loop"  # to start it once more is what is wrong
# What of a host can be at fault. Of other kinds the host is where it shows, not what causes it.
HOST_KINDS = frozenset({
    "xid", "gpu_error", "ecc", "throttle", "thermal_or_power", "slow_compute", "slow_link",
    "corruption", "replica_drift", LOOP_KIND,
})  # fmt: skip
RESTART_KINDS = frozenset({"hang", "desync"})  # they do not end by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The finding that explains a run, as its verdict names it."""

    id: int
    kind: str
    severity: str
    confidence: float
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    what: str
    next: str
    throughput_ratio: float | None = None
    rank_hours_per_day: float | None = None
    is_loop: bool = False  # or what the newest attempt in a row failed of


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a run. `None` means not known."""

    status: str
    answer_state: str  # culprit, advice, healthy, waiting, unknown
    answer_text: str
    is_recording: bool = False
    is_stale: bool = False  # the analysis is behind: what it says is of another moment
    cause: Cause | None = None
    num_hosts: int = 0
    num_ranks: int = 0
    step: int = 0
    saved_step: int = 0  # the last one that a whole checkpoint holds, 0: none was seen
    step_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, why, and how sure that is."""

    action: Action
    what: str
    why: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    findings: tuple[int, ...] = ()
    then: Literal["restart_from_checkpoint", ""] = ""
    from_step: int | None = None  # the step to restart behind; None: none is known
    confidence: float | None = None
    is_over: bool = False  # nothing can be done about this run any more

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what makes it other advice: numbers that waver do not."""
        return (self.action, self.then, self.hosts, self.ranks, self.findings)


def decide(seen: Situation) -> Decision:
    """Return what to do next."""
    if seen.is_recording:
        return _nothing("this run was imported: it is over", is_over=True)
    if seen.status == "ended":
        return _nothing("the run has ended", is_over=True)
    if seen.is_stale:
        return _unknown("the analysis of this server is behind: what it says is of another moment")
    if seen.status == "silent":
        return _unknown("nothing is heard of the run; see whether its nodes and collectors are up")
    if seen.cause is not None and seen.answer_state == "culprit":
        return _about(seen.cause, seen)
    if seen.status == "failed":
        return _unknown("the run failed, and why is not known")
    if seen.answer_state in ("healthy", "advice"):  # advice is for who sets up the next run
        return _nothing(seen.answer_text)
    if seen.answer_state == "waiting":
        return Decision(action="wait", what="Wait: it is too early to say", why=seen.answer_text)
    return _unknown(seen.answer_text)


def _about(cause: Cause, seen: Situation) -> Decision:
    if cause.is_loop:
        return _of_loop(cause, seen)
    if cause.kind in HOST_KINDS and cause.severity == "critical":
        return _of_host(cause, seen)
    if cause.kind in RESTART_KINDS:
        return _of_stop(cause, seen)
    if seen.status == "failed":
        return _unknown(f"{cause.what}; whether a restart meets the same is not known", cause)
    if cause.severity == "critical":
        return _unknown(f"{cause.what}; a person has to look: {cause.next}", cause)
    return Decision(
        action="nothing", what="Nothing for a controller to do",
        why=f"{cause.what}; that is not worth a restart, and may be worth a look",
        findings=(cause.id,), confidence=cause.confidence,
    )  # fmt: skip


def _of_host(cause: Cause, seen: Situation) -> Decision:
    named = tuple(sorted(set(cause.hosts)))
    if cause.confidence < LEAST_CONFIDENCE:
        return _wait(cause)
    if not named:
        return _unknown(f"{cause.what}; on which host is not known", cause)
    if len(named) > max(1, int(seen.num_hosts * MOST_HOSTS_RATIO)) or len(named) >= seen.num_hosts:
        return _unknown(
            f"{cause.what}; {len(named)} of {seen.num_hosts} hosts are too many to be the cause",
            cause,
        )
    return Decision(
        action="exclude_host", then="restart_from_checkpoint",
        what=f"Exclude {', '.join(named)} and restart{_behind(seen)}", why=cause.what,
        hosts=named, ranks=cause.ranks, findings=(cause.id,), from_step=seen.saved_step or None,
        confidence=cause.confidence,
    )  # fmt: skip


def _of_loop(cause: Cause, seen: Situation) -> Decision:
    """The finding names a host without a rank where other ranks of it failed each time."""
    if cause.kind == LOOP_KIND and cause.severity == "critical" and cause.hosts and not cause.ranks:
        return _of_host(cause, seen)
    if cause.confidence < LEAST_CONFIDENCE:
        return _wait(cause)
    kept = f": step {seen.saved_step:,} is saved" if seen.saved_step else ""
    return Decision(
        action="stop", what=f"Do not start it once more{kept}",
        why=f"{cause.what}; a restart meets the same until this is mended: {cause.next}",
        ranks=cause.ranks, findings=(cause.id,), from_step=seen.saved_step or None,
        confidence=cause.confidence,
    )  # fmt: skip


def _of_stop(cause: Cause, seen: Situation) -> Decision:
    if cause.confidence < LEAST_CONFIDENCE:
        return _wait(cause)
    return Decision(
        action="restart_from_checkpoint", what=f"Restart{_behind(seen)}",
        why=f"{cause.what}; it does not end by itself, and no host is known to be at fault",
        ranks=cause.ranks, findings=(cause.id,), from_step=seen.saved_step or None,
        confidence=cause.confidence,
    )  # fmt: skip


def _wait(cause: Cause) -> Decision:
    return Decision(
        action="wait", what="Wait: it is not sure enough to act on",
        why=f"{cause.what}; that is {percent_text(cause.confidence)} sure, "
        f"{percent_text(LEAST_CONFIDENCE)} are needed",
        findings=(cause.id,), confidence=cause.confidence,
    )  # fmt: skip


def _nothing(why: str, *, is_over: bool = False) -> Decision:
    return Decision(action="nothing", what="Nothing to do", why=why, is_over=is_over)


def _unknown(why: str, cause: Cause | None = None) -> Decision:
    return Decision(
        action="unknown", what="What to do is not known", why=why,
        findings=() if cause is None else (cause.id,),
        confidence=None if cause is None else cause.confidence,
    )  # fmt: skip


def _behind(seen: Situation) -> str:
    return f" behind step {seen.saved_step:,}" if seen.saved_step else " (no checkpoint was seen)"
