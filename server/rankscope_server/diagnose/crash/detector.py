"""Root cause among the errors of many ranks: who failed first, who echoes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import ClassVar

from rankscope.wire.schema import ErrorRaised
from rankscope_server.diagnose.crash.blame import accused, is_level, on_one_clock, points
from rankscope_server.diagnose.crash.failed_start import as_failed_start, is_failed_start
from rankscope_server.diagnose.crash.last_words import with_last_words
from rankscope_server.diagnose.crash.regrouping import is_survived
from rankscope_server.diagnose.crash.words import (
    CrashCause,
    crash_next,
    finding_of,
    is_before_training,
    printed_text,
)
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, ran
from rankscope_server.findings.text import capital, cut, ranks_text, seconds_text
from rankscope_server.known_errors.entry import KnownError
from rankscope_server.observe.failures import (
    ENDS_TRAINING,
    Failure,
    aborts_are_echoes,
    is_abort,
    is_segfault,
    is_unlike,
    of_end,
    of_error,
)


class RootCause:
    """Finds the rank whose failure began the end of a run, among those that merely echo it."""

    name: ClassVar[str] = "root-cause"
    finds: ClassVar[str] = "The failure that came first, among those that merely echo it"
    needs: ClassVar[str] = "errors and ends of ranks, their log lines for what no exception shows"
    silent: ClassVar[str] = "only harmless ends were seen; a stop from outside names no rank: info"

    def look(self, window: Window) -> DetectorResult:
        """Return the crash of an attempt, or that it was stopped from outside."""
        failures = _failures(window)
        cause = _cause(window, failures) if failures else None
        if cause is None:
            return ran(self, checked=("errors: no rank failed",))
        return ran(self, (finding_of(window, cause),))


def _failures(window: Window) -> list[Failure]:
    """Return every failure in order of time, one per rank and meaning."""
    errors = [error for error in window.errors if error.where != "thread"]
    found = [of_error(error) for error in window.errors if _counts(error, window)]
    found += [
        failure for ended in window.ended.values() if (failure := of_end(ended, errors)) is not None
    ]
    found = [failure for failure in found if not is_survived(window, failure)]
    found = aborts_are_echoes(found, [of_error(error) for error in window.errors])
    if misled := accused(window, "desync"):  # gloo ends the ranks that got another length
        found = [
            replace(one, role="cascade")
            if (is_abort(one) or is_segfault(one)) and one.rank not in misled
            else one
            for one in found
        ]
    found = [
        replace(
            failure,
            common_ns=on_one_clock(window, failure.rank, failure.time_ns),
        )
        for failure in _waiting_are_victims(window, with_last_words(window, found))
    ]
    found = [replace(one, role="cascade") if is_unlike(one) else one for one in found]
    return sorted(found, key=lambda failure: (failure.common_ns, failure.rank))


def _counts(error: ErrorRaised, window: Window) -> bool:
    """Return whether an exception ended its process, or the training in it.

    One in another thread or that was caught did not, nor one behind which steps were done.
    """
    if error.where == "training":
        return window.last_step(error.rank) <= error.step
    ended = window.ended.get(error.rank)
    if ended is not None and ended.reason == "clean":
        return False
    return error.where in ENDS_TRAINING or ended is not None


def _cause(window: Window, failures: list[Failure]) -> CrashCause | None:
    starts = _starts(window, failures)
    if starts and _is_stop_from_outside(window, starts, failures):
        starts = []
    echoes = _ranks(failures, "cascade")
    torn_down = _ranks(failures, "teardown")
    if starts and _all_left_alike(window, starts, failures):
        return _left_alike(window, starts, failures)
    if starts:
        crash = _crash(window, starts, failures)
        is_start = is_failed_start(window, crash.failures[0])
        return as_failed_start(window, crash, starts) if is_start else crash
    if echoes:
        return _only_echoes(window, echoes, torn_down, failures)
    return _stopped(window, failures)


def _starts(window: Window, failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures that may have begun it.

    An end that says nothing of its reason counts where nothing better is known, and where it
    certainly came first: then what others died of came from it.
    """
    starts = [failure for failure in failures if failure.role == "initiating"]
    strong = [failure for failure in starts if not failure.is_weak]
    if not strong or accused(window, "hang", "desync"):
        return strong or starts
    exits = [
        start for start in starts if start.ended is not None and start.ended.reason == "exit_code"
    ]
    if exits and exits[0] is starts[0] and not is_level(window, exits[0], strong[0]):
        return [exits[0], *(one for one in exits[1:] if is_level(window, exits[0], one))]
    return strong


def _waiting_are_victims(window: Window, failures: Iterable[Failure]) -> list[Failure]:
    """Return `failures` where an end for no known reason of a rank that waited for another of the
    failed ones is that one's consequence: their launcher ends all of them."""
    starts = [failure for failure in failures if failure.role == "initiating"]
    states = {
        start.rank: window.states[start.rank] for start in starts if start.rank in window.states
    }
    fewest: dict[str, int] = {}  # collectives that one of them came to, by group
    for state in states.values():
        for group in state.groups:
            fewest[group.group] = min(group.issued, fewest.get(group.group, group.issued))
    waiting = {
        rank
        for rank, state in states.items()
        if any(group.ended < group.issued > fewest[group.group] for group in state.groups)
    }
    return [
        replace(failure, role="teardown")
        if failure.is_weak and failure.rank in waiting
        else failure
        for failure in failures
    ]


def _ranks(failures: Sequence[Failure], role: str) -> tuple[int, ...]:
    return tuple(sorted({failure.rank for failure in failures if failure.role == role}))


def _is_stop_from_outside(
    window: Window, starts: Sequence[Failure], failures: Sequence[Failure]
) -> bool:
    """Return whether the job was killed as a whole: SIGKILL on all ranks, or long after a SIGTERM.

    A launcher that loses a rank to a SIGKILL stops the others at once, and who ends is seen a
    little late: what was killed around their SIGTERM was not killed for having stayed.
    """
    if any(failure.text.split(" (")[0] != "killed by SIGKILL" for failure in starts):
        return False
    killed = {failure.rank for failure in starts}
    stops = [failure for failure in failures if failure.role == "teardown"]
    if len(killed | {failure.rank for failure in stops}) < max(window.world_size, 2):
        return False
    first = min(failure.common_ns for failure in starts)
    spread = (max(failure.common_ns for failure in starts) - first) / 1e9
    if len(killed) == window.world_size:
        return spread <= window.policy.clock_band_seconds
    grace_ns = window.policy.kill_grace_seconds * 1e9
    return bool(stops) and first - min(stop.common_ns for stop in stops) >= grace_ns


def _all_left_alike(window: Window, starts: Sequence[Failure], failures: Sequence[Failure]) -> bool:
    """Return whether the program that started the ranks may have ended them, as a success.

    Ray ends its workers so once the driver has their results: all exit with code 1 in the same
    step, while the command keeps running and ends with code 0.
    """
    facts = window.facts
    return (
        bool(facts.launched_ns)
        and not facts.left_code
        and len(starts) == len(failures)
        and {start.rank for start in starts} == set(range(window.world_size))
        and all(start.is_weak for start in starts)
        and len({(start.text, start.step) for start in starts}) == 1
    )


def _left_alike(window: Window, starts: list[Failure], failures: Sequence[Failure]) -> CrashCause:
    cause = _crash(window, starts, failures)
    if window.facts.left_code is None:
        reason = "no exception and no signal was seen, and the command that started them still runs"
        return replace(cause, severity="warning", confidence=0.4, reason=reason)
    return replace(
        cause,
        failures=(),
        severity="info",
        confidence=0.8,
        reason="all ranks left alike, and the command that started them ended with code 0",
        what=f"All {window.world_size} ranks {starts[0].text}",
        why="The command that started them ended with code 0: it took this for their end",
        next="Nothing to do",
        began=starts[0],
    )


def _crash(window: Window, starts: list[Failure], failures: Sequence[Failure]) -> CrashCause:
    scored = points(window, starts)
    best = max(scored.values())
    one_each = {failure.rank: failure for failure in reversed(starts) if scored[failure] == best}
    rivals = sorted(one_each.values(), key=lambda failure: (failure.common_ns, failure.rank))
    first = rivals[0]
    alike = [failure for failure in rivals if failure.signature == first.signature]
    if len(alike) * 2 > len(rivals):
        rivals = alike
    ranks = tuple(failure.rank for failure in rivals)
    echoes = tuple(r for r in _ranks(failures, "cascade") if r not in ranks)
    failed = {failure.rank for failure in failures if failure.role == "initiating"}
    late = tuple(sorted(failed - set(ranks) - set(echoes)))
    torn_down = tuple(r for r in _ranks(failures, "teardown") if r not in {*ranks, *echoes, *late})
    who = window.who(ranks)
    confidence, reason = _crash_confidence(window, rivals, echoes, late)
    return CrashCause(
        failures=tuple(rivals),
        echoes=tuple(sorted({*echoes, *late})),
        torn_down=torn_down,
        severity="critical",
        confidence=confidence,
        reason=reason,
        what=f"{who} {_did(rivals)}{_at(window, first)}{printed_text(first)}",
        why=_crash_why(window, rivals, echoes, late, torn_down, failures),
        next=crash_next(window, first),
    )


def _did(rivals: Sequence[Failure]) -> str:
    first = rivals[0]
    if first.error is not None:
        both = "raised " if len({f.signature for f in rivals}) == 1 else "failed, one by "
        return f"{both}{cut(first.text, 160)}"
    if first.text.startswith("killed"):
        return f"{'were' if len(rivals) > 1 else 'was'} {first.text}"
    return first.text


def _at(window: Window, failure: Failure) -> str:
    if is_before_training(window, failure):
        return " before its first step was done"
    return f" in step {failure.step:,}" if failure.step else ""


def _crash_why(
    window: Window,
    rivals: Sequence[Failure],
    echoes: Sequence[int],
    late: Sequence[int],
    torn_down: Sequence[int],
    failures: Sequence[Failure],
) -> str:
    first = rivals[0]
    parts = []
    next_one = next((f for f in failures if f.rank not in {r.rank for r in rivals}), None)
    earlier = {failure.rank for failure in failures if failure.common_ns < first.common_ns}
    if len(rivals) > 1:
        parts.append(
            f"{len(rivals)} ranks failed within "
            f"{seconds_text((rivals[-1].common_ns - first.common_ns) / 1e9)} of each other"
        )
    elif next_one is not None:
        parts.append(_lead_text(window, first, next_one))
    else:
        parts.append(f"no other of the {window.world_size} ranks reported a failure")
    if echoes:
        parts.append(f"{ranks_text(echoes)} {_verb(echoes, 'echoes', 'echo')} it (connection lost)")
    if late:
        order = "too" if earlier.intersection(late) else "after it"
        parts.append(f"{ranks_text(late)} failed {order}")
    if torn_down:
        then = "" if earlier.intersection(torn_down) else "then "
        parts.append(f"{ranks_text(torn_down)} {_verb(torn_down, 'was', 'were')} {then}stopped")
    return capital("; ".join(parts))


def _lead_text(window: Window, first: Failure, other: Failure) -> str:
    """Return how the failure that is named and the first of the others follow each other."""
    lead = (other.common_ns - first.common_ns) / 1e9
    if lead >= 0:
        return f"it failed first, {seconds_text(lead)} before rank {other.rank}"
    earlier = f"{seconds_text(-lead)} earlier"
    if _waits_for(window, other.rank, first.rank):
        return f"rank {other.rank}, which ended {earlier}, waited for it"
    return f"rank {other.rank} {'was stopped' if other.role == 'teardown' else 'ended'} {earlier}"


def _waits_for(window: Window, rank: int, other: int) -> bool:
    """Return whether a rank was last seen in a collective that another one had not come to."""
    if not {rank, other} <= window.states.keys():
        return False
    came_to = {group.group: group.issued for group in window.states[other].groups}
    return any(
        group.ended < group.issued > came_to.get(group.group, group.issued)
        for group in window.states[rank].groups
    )


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _crash_confidence(
    window: Window, rivals: Sequence[Failure], echoes: Sequence[int], late: Sequence[int]
) -> tuple[float, str]:
    first = rivals[0]
    if len(rivals) > 1 and len({failure.signature for failure in rivals}) > 1:
        return 0.5, "several ranks failed at once and their order is within the clocks' error"
    if first.is_weak:
        return 0.6, "no exception and no signal was seen, only the end"
    hosts = window.hosts((first.rank, *late))
    if any(not isfinite(window.clocks.band_ms(hosts[0], host)) for host in hosts[1:]):
        return 0.6, "others failed as well, and how far the clocks of their hosts differ is unknown"
    if echoes:
        return 0.95, "it failed by itself, the others name a lost connection"
    return 0.9, "it failed by itself, and no other failure came before"


def _only_echoes(
    window: Window,
    echoes: tuple[int, ...],
    torn_down: tuple[int, ...],
    failures: Sequence[Failure],
) -> CrashCause:
    """Return that the origin was not captured; a rank that left before is named with a hedge."""
    first = next(failure for failure in failures if failure.role == "cascade")
    left = [
        ended
        for ended in window.ended.values()
        if ended.reason == "clean"
        and on_one_clock(window, ended.rank, ended.time_ns) <= first.common_ns
        and ended.rank not in echoes
    ]
    gone = min(left, key=lambda ended: ended.time_ns, default=None)
    silent = [
        rank for rank in range(window.world_size) if rank not in echoes and rank not in torn_down
    ]
    culprits: tuple[Failure, ...] = ()
    if gone is not None:
        culprits = (Failure(gone.rank, gone.time_ns, "initiating", "left", gone.last_step,
                            ended=gone, is_weak=True),)  # fmt: skip
        what = (
            f"{window.who((gone.rank,))} ended without an "
            f"error{_at(window, culprits[0])}, while the others went on"
        )
    else:
        what = f"Ranks lost each other{_at(window, first)}; the origin was not captured"
    unlike = next((one for one in failures if is_unlike(one)), None)
    if unlike is not None and unlike.entry is not None and not accused(window, "desync"):
        return _unlike_calls(window, unlike, unlike.entry, echoes, torn_down)
    missing = f"; nothing came from {ranks_text(silent)}" if 0 < len(silent) <= 8 else ""
    return CrashCause(
        failures=culprits,
        echoes=echoes,
        torn_down=torn_down,
        severity="critical" if gone is not None else "warning",
        confidence=0.6 if gone is not None else 0.3,
        reason="only echoes of a failure were seen",
        what=what,
        why=f"{capital(ranks_text(echoes))} reported {cut(first.text, 160)}{missing}",
        next=(
            "See why its loop ended earlier: unequal data, or a condition that differs by rank"
            if gone is not None
            else "Look for the rank whose last records are missing, and at its host's kernel log"
        ),
        began=first,
    )


def _unlike_calls(
    window: Window,
    first: Failure,
    entry: KnownError,
    echoes: tuple[int, ...],
    torn_down: tuple[int, ...],
) -> CrashCause:
    return CrashCause(
        failures=(),
        echoes=echoes,
        torn_down=torn_down,
        severity="critical",
        confidence=0.8,
        reason="a library compared the calls; which rank's call was the wrong one it cannot know",
        what=f"The ranks called different collectives{_at(window, first)}",
        why=f"Rank {first.rank} ended with: {cut(first.line or first.text, 200)}",
        next=entry.remedy,
        began=first,
    )


def _stopped(window: Window, failures: Sequence[Failure]) -> CrashCause | None:
    """Return that the job was stopped by a signal: no rank is named."""
    hit = tuple(sorted({failure.rank for failure in failures}))
    if not hit:
        return None
    names = sorted({failure.text.split(" (")[0] for failure in failures})
    is_own = window.facts.left_code == 0  # as a notebook ends its kernel
    by = "by its own command, which ended with code 0," if is_own else "from outside"
    return CrashCause(
        failures=(),
        echoes=(),
        torn_down=hit,
        severity="info",
        confidence=0.9,
        reason="no rank failed by itself",
        what=f"The job was stopped {by}{_at(window, max(failures, key=lambda one: one.step))}",
        why=f"{len(hit)} of {window.world_size} ranks: {cut(', '.join(names), 120)}",
        next="Nothing to do if this was you or the scheduler",
    )
