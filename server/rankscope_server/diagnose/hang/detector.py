"""Hangs: who has not arrived, and who only waits because of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rankscope.wire.schema import RankState
from rankscope_server.diagnose.hang.wait_graph import Tangle, WaitGraph, activity_ns, build, tangles
from rankscope_server.diagnose.hang.words import HangCase, hang_finding
from rankscope_server.diagnose.shared.call_differences import differences
from rankscope_server.diagnose.shared.comparison import unmatched
from rankscope_server.diagnose.shared.connections import stuck_link, with_location
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import NOT_HERE, DetectorResult, Finding, ran, skipped
from rankscope_server.findings.text import capital, ranks_text
from rankscope_server.observe.failures import ENDS_TRAINING

_FIRST_STEP = 1
_SECOND = 1e9


class Hang:
    """Finds the ranks that an operation waits for while nothing moves, behind all who wait."""

    name: ClassVar[str] = "hang"
    finds: ClassVar[str] = (
        "Ranks that an operation waits for while nothing moves, behind all who wait"
    )
    needs: ClassVar[str] = (
        "states of ranks, process groups; TCP connections of ranks show whose link carries nothing"
    )
    silent: ClassVar[str] = (
        "a checkpoint, an evaluation or start-up explains it; the rank still moves: see `straggler`"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return the roots of every tangle that has not moved for too long."""
        if window.world_size == 1:
            return skipped(self, "one rank waits for no other", NOT_HERE)
        if not window.states and window.facts.is_recording:
            return skipped(self, "it shows steps that have ended, not where a rank is", NOT_HERE)
        if not window.states:
            return skipped(self, "no rank has said yet where it is", "wait, or see coverage")
        if (lack := unmatched(window)) is not None:
            return skipped(self, *lack)
        if not window.groups:
            return skipped(self, "no process group is known yet", "wait for init_process_group")
        patience = Patience(window)
        still = [
            rank for rank in window.states if patience.is_still(rank) and not patience.is_gone(rank)
        ]
        still = [rank for rank in still if not patience.is_silent(rank)]
        findings: list[Finding] = []
        if still:
            graph = build(window, still)
            for tangle in _explained(window, tangles(window, graph)):
                case = _case(window, graph, tangle, patience)
                if case is not None:
                    findings.append(_placed(window, case, hang_finding(window, case)))
        findings = [finding for finding in findings if not _follows_failure(window, finding)]
        findings = _with_memory(window, findings)
        checked = () if findings else (_nothing_waits(window, patience),)
        return ran(self, findings, checked, not_known=() if findings else _unclear(window, still))


def _unclear(window: Window, still: Sequence[int]) -> list[str]:
    """Return that ranks have not moved for too long, where nothing is known of what they are in."""
    patience, unclear = Patience(window), build(window, still).unclear
    quiet = [
        rank for rank in still
        if (rank in unclear or not window.states[rank].groups)
        and patience.idle_seconds(rank) >= patience.seconds(rank, "", "", 0)
    ]  # fmt: skip
    if not quiet:
        return []
    seconds = max((patience.idle_seconds(r) for r in quiet if patience.has_moved(r)), default=None)
    have = "have" if len(quiet) > 1 else "has"
    since = "yet" if seconds is None else f"for {seconds:.0f} s"
    return [
        f"{capital(ranks_text(quiet))} {have} not moved {since}, and the collectives of their "
        "groups are not known"
    ]


class Patience:
    """How long a rank may stay still. All times of a rank are compared on its own clock."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._policy = window.policy
        self._step_seconds = _slow_step_seconds(window)
        self._newest_ns = max(window.heard_ns.values(), default=0)

    def now_ns(self, rank: int) -> int:
        """Return the time at which this rank was last seen, or at which it ended."""
        state, ended = self._window.states[rank], self._window.ended.get(rank)
        return state.time_ns if ended is None else min(ended.time_ns, state.time_ns)

    def idle_seconds(self, rank: int) -> float:
        """Return for how long no hook has run in a rank, when it was last seen.

        Where none is known to have run that is for ever: no number for people.
        """
        return (self.now_ns(rank) - activity_ns(self._window.states[rank])) / _SECOND

    def has_moved(self, rank: int) -> bool:
        """Return whether a hook is known to have run in a rank."""
        return activity_ns(self._window.states[rank]) > 0

    def is_still(self, rank: int) -> bool:
        """Return whether a rank has not moved for a good part of the shortest patience."""
        return self.idle_seconds(rank) >= self._policy.hang_floor_seconds / 2

    def is_silent(self, rank: int) -> bool:
        """Return whether nothing comes from a rank's node although others report."""
        late = self._newest_ns - self._window.heard_ns.get(rank, 0)
        return rank not in self._window.ended and late / _SECOND >= self._policy.silent_seconds

    def is_gone(self, rank: int) -> bool:
        """Return whether a process ended in the middle of its work, not after it had hung."""
        ended, state = self._window.ended.get(rank), self._window.states.get(rank)
        if ended is None:
            return state is not None and not state.alive
        return state is None or self.idle_seconds(rank) < self._policy.hang_floor_seconds

    def seconds(self, root: int | None, group: str, operation: str, size_bytes: int) -> float:
        """Return how long an operation may wait for `root` (None: for the network)."""
        policy = self._policy
        p99_ns = self._window.times.quantile_ns(group, operation, size_bytes)
        usual = max((p99_ns or 0.0) / _SECOND, self._step_seconds) * policy.hang_p99_multiple
        patience = min(max(policy.hang_floor_seconds, usual), policy.hang_ceiling_seconds)
        if root is None:
            return max(patience, policy.hang_transfer_seconds)
        state = self._window.states.get(root)
        if state is None:
            return patience
        if state.step <= _FIRST_STEP or self._is_first_of_attempt(state):
            patience = max(patience, policy.hang_startup_seconds)
        if state.phase in ("checkpoint", "evaluation"):
            patience = max(patience, policy.hang_special_seconds)
        return patience

    def _is_first_of_attempt(self, state: RankState) -> bool:
        steps = self._window.steps.steps
        return not self._window.steps.dropped_steps and (
            not len(steps) or state.step <= int(steps[0])
        )


def _explained(window: Window, found: list[Tangle]) -> list[Tangle]:
    """Name, of ranks that wait for each other, those that called something else."""
    if not any(tangle.is_cycle for tangle in found):
        return found
    wrong = {
        r
        for difference in differences(window)
        if not difference.is_tie
        for r in difference.culprits.ranks
    }
    return [
        replace(tangle, roots=tuple(sorted(wrong & tangle.ranks)))
        if tangle.is_cycle and wrong & tangle.ranks
        else tangle
        for tangle in found
    ]


def _follows_failure(window: Window, finding: Finding) -> bool:
    """Return whether a rank failed before this could be a hang: root-cause names that rank.

    Who waits then waits because of the failure. A hang that was one before keeps standing: that
    the job was stopped in the end, or that victims gave up, is its consequence.
    """
    failed = [error.time_ns for error in window.errors if error.where in ENDS_TRAINING]
    failed += [ended.time_ns for ended in window.ended.values() if ended.reason != "clean"]
    if not failed or finding.onset_ms is None:
        return bool(failed)
    return min(failed) / 1e6 - finding.onset_ms < window.policy.hang_floor_seconds * 1e3


def _slow_step_seconds(window: Window) -> float:
    """Return how long a slow step of late takes."""
    table = window.steps
    first = max(0, table.num_steps - window.policy.hang_recent_steps)
    times = table.get("duration", first)[:, ~table.special(first)]
    known = times[~np.isnan(times)]
    return float(np.quantile(known, window.policy.slow_step_share)) / 1e3 if len(known) else 0.0


def _case(window: Window, graph: WaitGraph, tangle: Tangle, patience: Patience) -> HangCase | None:
    """Return the case of a tangle if it has lasted too long for each of its roots."""
    waiters = sorted(rank for rank in tangle.ranks if rank in graph.waits)
    if not tangle.is_certain and graph.unclear.intersection(tangle.roots):
        return None  # a group with a member that was never heard of: coverage says so
    roots = tuple(
        root for root in tangle.roots if _is_overdue(window, graph, tangle, root, patience)
    )
    if tangle.roots and not roots:
        return None
    if tangle.is_cycle and len(roots) != len(tangle.roots):
        return None
    if not roots and not _transfer_is_overdue(graph, tangle.stuck, patience):
        return None
    silent = tuple(root for root in roots if patience.is_silent(root))
    heard = tuple(root for root in roots if root not in silent)
    roots = heard or silent  # one that is known to hang explains the wait; of silence none knows
    victims = tuple(rank for rank in waiters if rank not in roots)
    accused = frozenset(roots)
    direct = tuple(r for r in victims if not accused.isdisjoint(graph.waits[r].lacks))
    direct = direct if roots else tangle.stuck
    # Named by the operation that most of them are in; of equals by a collective, which says
    # more than an exchange, and by the one entered first.
    names = [graph.waits[rank].name for rank in direct]
    first = min(
        direct or tuple(waiters),
        key=lambda rank: (
            -names.count(graph.waits[rank].name),
            not graph.waits[rank].sequence,
            graph.since_ns[rank],
        ),
    )
    operation = graph.waits[first]
    return HangCase(
        roots=roots,
        operation=operation,
        alike=tuple(
            rank
            for rank in direct or victims
            if (graph.waits[rank].name, graph.waits[rank].group)
            == (operation.name, operation.group)
        ),
        waiters=victims,
        waited_seconds=(patience.now_ns(first) - graph.since_ns[first]) / _SECOND,
        still_in={root: graph.waits[root] for root in roots if root in graph.waits},
        idle_seconds={
            root: patience.idle_seconds(root)
            for root in roots
            if root in window.states and patience.has_moved(root)
        },
        gone=tuple(root for root in roots if patience.is_gone(root)),
        silent=() if heard else silent,
        unheard=silent if heard else (),
        is_cycle=tangle.is_cycle,
        is_certain=tangle.is_certain,
        is_open=tangle.is_cycle and not _are_calls_known(window, roots),
    )


def _are_calls_known(window: Window, ranks: Sequence[int]) -> bool:
    """Return whether the calls of some ranks before they stopped are known as well as any."""
    events, is_thinned = window.replays.events, bool(window.steps.thinned().any())
    steps = np.array([window.states[rank].step if rank in window.states else 0 for rank in ranks])
    now = np.array([events.is_seen(rank, steps) for rank in window.ranks or ranks])
    if now.any():
        return all(events.is_seen(rank, steps).all() for rank in ranks)
    # Where nothing is thinned, nor lost in the steps before, a step without rows is one in which no
    # operation has ended.
    backs = range(1, window.policy.hang_seen_steps + 1)
    before = [np.maximum(steps - back, np.minimum(steps - 1, 1)) for back in backs]
    return not is_thinned and all(events.is_seen(rank, b).all() for rank in ranks for b in before)


def _placed(window: Window, case: HangCase, finding: Finding) -> Finding:
    """Name the link of a stuck transfer, where the connections of its members show it."""
    location = None if case.roots else stuck_link(window, finding.onset_ms)
    if location is None:
        return finding
    ends = location.ranks or (location.bad[0].sender, location.bad[0].receiver)
    if not {*ends} <= {*case.operation.members}:
        return finding  # something else that does not move
    return with_location(
        window, finding, location, finding.what.replace(":", ","), finding.severity
    )


def _is_overdue(
    window: Window, graph: WaitGraph, tangle: Tangle, root: int, patience: Patience
) -> bool:
    """Return whether a root keeps others waiting for too long and does not move itself."""
    longest, began_ns = 0.0, 0
    allowed = window.policy.hang_ceiling_seconds
    for rank in tangle.ranks:
        operation = graph.waits.get(rank)
        if operation is None or rank == root:
            continue
        waited = (patience.now_ns(rank) - graph.since_ns[rank]) / _SECOND
        if waited > longest:
            longest, began_ns = waited, graph.since_ns[rank]
            allowed = patience.seconds(root, operation.group, operation.name, operation.size_bytes)
    if longest < allowed:
        return False
    if root not in window.states or patience.is_gone(root):
        return True
    if patience.is_silent(root):  # not if its records stopped long before a rank waited
        late = (began_ns - window.states[root].time_ns) / _SECOND
        return late < window.policy.silent_seconds
    return patience.idle_seconds(root) >= allowed


def _transfer_is_overdue(graph: WaitGraph, waiters: Sequence[int], patience: Patience) -> bool:
    """Return whether an operation that all have entered has been under way for too long."""
    return all(
        patience.now_ns(rank) - graph.since_ns[rank]
        >= _SECOND * patience.seconds(None, operation.group, operation.name, operation.size_bytes)
        for rank in waiters
        for operation in [graph.waits[rank]]
    )


def _with_memory(window: Window, findings: list[Finding]) -> list[Finding]:
    """Keep earlier hangs: as over once the roots move again, else as they were.

    When victims give up with a time-out, or the job is stopped, the open operations are gone
    and with them the graph; the hang is what happened all the same.
    """
    now = {finding.key: finding for finding in findings}
    for key, old in window.before.items():
        if old.detector != Hang.name:
            continue
        again = [
            other for other in findings if other.key == key or set(other.ranks) & set(old.ranks)
        ]
        is_over = old.state == "open" and _moved_on(window, old)
        if again and (is_over or not _was_worse(window, old, again)):
            continue
        for other in again:
            now.pop(other.key, None)
        if is_over:
            steps = [s.step for rank in old.ranks or old.victims if (s := window.states.get(rank))]
            old = replace(old, state="recovered", ended_step=max(steps, default=old.onset_step))
        now[key] = old
    return list(now.values())


def _was_worse(window: Window, old: Finding, again: Sequence[Finding]) -> bool:
    """Return whether fewer wait than before only because ranks have ended since.

    Then what was seen at its height is what happened.
    """
    fewer = all(len(finding.victims) < len(old.victims) for finding in again)
    return old.state == "open" and fewer and not window.ended.keys().isdisjoint(old.victims)


def _moved_on(window: Window, old: Finding) -> bool:
    for rank in old.ranks or old.victims:
        state = window.states.get(rank)
        if state is None:
            continue
        entered = max((max(g.issued_ns, g.p2p_issued_ns) for g in state.groups), default=0)
        if state.step > (old.onset_step or 0) or entered / 1e6 > (old.onset_ms or 0.0) + 1.0:
            return True
    return False


def _nothing_waits(window: Window, patience: Patience) -> str:
    moved = [rank for rank in window.states if patience.has_moved(rank)]
    if not moved:
        return "hang: no rank has come to a step or a collective"
    if window.has_ended:
        return "hang: no rank waited in vain when it ended"
    longest = max(patience.idle_seconds(rank) for rank in moved)
    return f"hang: the rank that is quiet for longest moved {max(longest, 0.0):.1f} s ago"
