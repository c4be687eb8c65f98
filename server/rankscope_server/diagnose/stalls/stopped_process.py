"""Ranks whose process is stopped as a whole: by a signal, a debugger, a frozen control group.

Steps distinguish such a rank from a slow one only where its waits are seen, and not why. The
collector asks the kernel for the state of each process; the time between two samples counts as the
first. Where the collector was paused too, the first sample after that counts for the time before
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankscope.wire.sample_columns import MACHINE_PAUSED
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Evidence, Finding, ran, skipped
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array
from rankscope_server.findings.text import (
    percent_text,
    ranks_text,
    seconds_text,
)


@dataclass(frozen=True, slots=True)
class StopCause:
    """What a finding says about what stopped a process."""

    by: str
    next: str
    confidence: str = "the kernel says so; how long is counted in samples"
    ruled_out: str = "A slow GPU, processor or disk: a process that works is not in this state"
    disproof: str = "You stopped it yourself, or no other rank waits for this one"


_CAUSES = {
    1: StopCause(
        "a signal (state T)",
        "Find who sends SIGSTOP: a job manager that suspends, a checkpoint tool, a script, Ctrl-Z",
    ),
    2: StopCause("a debugger (state t)", "Find the debugger or tracer that holds it, by TracerPid"),
    3: StopCause(
        "a frozen control group",
        "Find who freezes its control group: a paused container, a job manager that suspends",
    ),
    MACHINE_PAUSED: StopCause(
        "a pause of the machine or container, in which the collector did not run either",
        "Find what pauses the machine: a paused container, a virtual machine that is migrated or "
        "saved, a computer that sleeps",
        confidence="the collector, asleep, woke so much later than it was meant to, and the "
        "ranks used no processor meanwhile",
        ruled_out="Other work on the machine: time in which the collector was ready to run and "
        "had no processor is not counted",
        disproof="The machine was out of memory and paged (see major faults and memory pressure), "
        "or no other rank waits for these",
    ),
}
STOPPED_BY = {code: cause.by for code, cause in _CAUSES.items()}


@dataclass(frozen=True, slots=True)
class Stops:
    """The stops of one rank that belong together. Times are ns of its host's wall clock."""

    rank: int
    begin_ns: int
    last_ns: int  # of the last sample that found it stopped
    end_ns: int  # until when the share is meant
    stopped_ns: int
    num_samples: int
    num_stopped: int
    num_times: int  # apart from each other
    by: int
    is_over: bool
    is_whole: bool  # stopped in every sample since it began

    def cost(self, policy: Policy) -> float:
        """Return the share of the time that is lost while all wait for this rank."""
        least_ns = policy.stopped_span_seconds * 1e9
        return float(self.stopped_ns / max(self.end_ns - self.begin_ns, least_ns))


class StoppedProcess:
    """Finds ranks whose process is stopped, alone or with all of their machine."""

    name: ClassVar[str] = "stopped-process"
    finds: ClassVar[str] = (
        "Ranks whose process is stopped: by a signal, a debugger, a frozen control group, or with "
        "all of its machine or container"
    )
    needs: ClassVar[str] = "samples of the ranks' processes"
    silent: ClassVar[str] = "it was seen stopped in one sample only"

    def look(self, window: Window) -> DetectorResult:
        """Return the ranks that were seen stopped more than once."""
        found, num_seen = [], 0
        for rank, known in sorted(window.ranks.items()):
            times_ns, by = window.samples.stopped_by(rank, known.pid)
            num_seen += len(times_ns) > 0
            stops = stops_of(rank, times_ns, by, window.policy)
            if stops is not None:
                found.append(stops)
        if not num_seen:
            return skipped(
                self, "no sample of a rank's process", "see that the collector runs on its host"
            )
        findings = [_finding(window, event) for event in _together(found, window.policy)]
        checked = () if findings else (f"state of {num_seen} processes: none was stopped",)
        return ran(self, findings, checked)


def stops_of(
    rank: int, times_ns: Sequence[int] | Array, by: Sequence[int] | Array, policy: Policy
) -> Stops | None:
    """Return the newest stops of a rank that belong together, None for less than two samples.

    A single sample is enough where it reports a pause of all: that was measured from both ends.
    """
    times, codes = np.asarray(times_ns), np.asarray(by)
    hits = np.flatnonzero(codes > 0)
    if not len(hits):
        return None
    apart = np.flatnonzero(np.diff(times[hits]) > policy.stopped_series_seconds * 1e9)
    hits = hits[apart[-1] + 1 if len(apart) else 0 :]
    is_paused = codes == MACHINE_PAUSED
    if len(hits) < policy.stopped_least and not is_paused[hits].any():
        return None
    usual_ns = int(np.median(np.diff(times))) if len(times) > 1 else 0
    lasts_ns = np.minimum(np.diff(times, append=times[-1] + usual_ns), 3 * usual_ns)
    since_ns = np.diff(times, prepend=times[0])
    lasts_ns = np.where(is_paused, np.maximum(since_ns - usual_ns, 0), lasts_ns)
    begins = np.where(is_paused, times - lasts_ns, times)
    begin, last = int(begins[hits[0]]), int(times[hits[-1]])
    newest_ns = int(times[-1])
    who, places = np.unique(codes[hits], return_inverse=True)  # codes, whatever numbers were sent
    starts = hits[np.flatnonzero(np.diff(hits, prepend=hits[0] - 2) > 1)]
    between_ns = float(np.diff(times[starts]).max(initial=0))
    is_over = newest_ns - last > max(policy.stopped_over_seconds * 1e9, 2 * between_ns)
    inside = slice(hits[0], hits[-1] + 1 if is_over else len(times))
    return Stops(
        rank=rank,
        begin_ns=begin,
        last_ns=last,
        end_ns=last + usual_ns if is_over else max(newest_ns, last + usual_ns),
        stopped_ns=int(lasts_ns[hits].sum()),
        num_samples=len(codes[inside]),
        num_stopped=len(hits),
        num_times=len(starts),
        by=int(who[np.bincount(places, weights=lasts_ns[hits] + 1).argmax()]),
        is_over=bool(is_over),
        is_whole=bool((codes[inside] > 0).all()),
    )


def _together(found: Sequence[Stops], policy: Policy) -> list[list[Stops]]:
    """Return the ranks that were stopped and let go together as one event each."""
    events: list[list[Stops]] = []
    for stops in sorted(found, key=lambda one: (one.begin_ns, one.rank)):
        near_ns = policy.stopped_near_seconds * 1e9
        for event in events:
            first = event[0]
            if (
                stops.begin_ns - first.begin_ns <= near_ns
                and abs(stops.last_ns - first.last_ns) <= near_ns
                and stops.by == first.by
            ):
                event.append(stops)
                break
        else:
            events.append([stops])
    return events


def _finding(window: Window, event: Sequence[Stops]) -> Finding:
    worst = max(event, key=lambda one: one.stopped_ns)
    cause = _CAUSES[worst.by]
    ranks = tuple(sorted(stops.rank for stops in event))
    cost = worst.cost(window.policy)
    name = "+".join(map(str, ranks[:8]))
    step = _onset_step(window, f"{window.attempt}/{StoppedProcess.name}/{name}", worst.begin_ns)
    ended = window.step_at(worst.last_ns) if worst.is_over else None
    return window.finding(
        "stopped_process",
        name,
        detector=StoppedProcess.name,
        is_over=worst.is_over,
        ranks=ranks,
        onset_step=step,
        onset_ms=worst.begin_ns / 1e6,
        ended_step=ended,
        cost=cost,
        what=_what(window, ranks, worst, step),
        why=f"{worst.num_stopped} of {worst.num_samples} samples found "
        f"{'it' if len(ranks) == 1 else ranks_text((worst.rank,))} stopped by "
        f"{cause.by}; a stopped process does nothing, and the job loses "
        f"{percent_text(cost)} of its time where all wait for it",
        next=cause.next,
        command=""
        if worst.by == MACHINE_PAUSED
        else f"grep -E 'State|TracerPid' /proc/{window.ranks[worst.rank].pid}/status",
        confidence=(0.95, cause.confidence),
        evidence=tuple(
            Evidence(
                f"Rank {stops.rank}, process {window.ranks[stops.rank].pid}: stopped for about "
                f"{seconds_text(stops.stopped_ns / 1e9)}",
                window.link(stops.rank, step),
            )
            for stops in event[:8]
        ),
        ruled_out=(cause.ruled_out,),
        disproof=cause.disproof,
        victims=window.others(ranks),
    )


def _what(window: Window, ranks: tuple[int, ...], worst: Stops, step: int | None) -> str:
    who = f"{window.who(ranks)}"
    lasted = seconds_text(worst.stopped_ns / 1e9)
    are, were = ("is", "was") if len(ranks) == 1 else ("are", "were")
    since = "" if step is None else f" since step {step:,}"
    if worst.by == MACHINE_PAUSED:
        often = f" in all, {worst.num_times} times" if worst.num_times > 1 else ""
        place = since if often else since.replace("since", "at")
        return f"{who} {were} paused for {lasted}{often}{place}, with the machine or container"
    if worst.is_whole and not worst.is_over:
        return f"{who} {are} stopped{since}, for {lasted} so far: the process does not run"
    if worst.is_whole:
        return f"{who} {were} stopped for {lasted}{since.replace('since', 'at')}"
    if worst.is_over:
        return f"{who} {were} stopped again and again{since}, for {lasted} in all"
    share = percent_text(worst.stopped_ns / max(worst.end_ns - worst.begin_ns, 1))
    return f"{who} {are} stopped again and again{since}, {share} of the time"


def _onset_step(window: Window, key: str, begin_ns: int) -> int | None:
    """Return the step in which stops began, as it was known before the table moved on."""
    before = window.before.get(key)
    if before is not None and before.onset_ms == begin_ns / 1e6 and before.onset_step is not None:
        return before.onset_step
    return window.step_at(begin_ns)
