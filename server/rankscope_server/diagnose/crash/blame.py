"""How likely each failure is the one that began it, in the points of `Policy`.

For a failure that begins by itself, for a rank that others waited for or that called something else
than the others, for an end by a signal or the first end, for an error that few ranks have, for the
earliest where the clocks can show it. The highest is named; points are whole, so that two are
level, less than one point apart, only if they are equal: then both are named. What healthy runs
show too is taken off before: such lines say nothing of an end (`last_words`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.observe.failures import Failure

_DEADLY = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


def points(window: Window, failures: Sequence[Failure]) -> dict[Failure, int]:
    """Return the points of each failure; `failures` are in order of time."""
    policy = window.policy
    of_role = {
        "initiating": policy.blame_begins,
        "cascade": policy.blame_echo,
        "teardown": policy.blame_stopped,
    }
    at_fault = accused(window, "hang", "desync")
    ends = {rank: on_one_clock(window, rank, one.time_ns) for rank, one in window.ended.items()}
    first_ns = min(ends.values(), default=0)
    first_ends = {
        rank
        for rank, end_ns in ends.items()
        if window.ended[rank].reason != "clean" and _is_level(window, first_ns, end_ns)
    }
    ranks_of: dict[str, set[int]] = {}
    for failure in failures:
        ranks_of.setdefault(failure.signature, set()).add(failure.rank)
    few = max(1, int(window.world_size * policy.rare_ratio))
    return {
        failure: (policy.blame_weak if failure.is_weak else of_role[failure.role])
        + policy.blame_at_fault * (failure.rank in at_fault)
        + policy.blame_ended * (failure.rank in first_ends or _died_by_signal(failure))
        + policy.blame_rare * (len(ranks_of[failure.signature]) <= few)
        + policy.blame_earliest * is_level(window, failures[0], failure)
        for failure in failures
    }


def accused(window: Window, *kinds: str) -> set[int]:
    """Return the ranks that findings of these kinds name."""
    return {
        rank
        for finding in window.before.values()
        if finding.kind in kinds and finding.severity == "critical"
        for rank in finding.ranks
    }


def is_level(window: Window, first: Failure, other: Failure) -> bool:
    """Return whether two failures have no certain order in time."""
    host = window.host(first.rank)
    same_host = bool(host) and host == window.host(other.rank)
    policy = window.policy
    band = policy.same_host_band_seconds if same_host else policy.clock_band_seconds
    if other.signature == first.signature:
        band = policy.clock_band_seconds  # the same error on many ranks: a fault of the script
    elif not same_host:
        hosts = host, window.host(other.rank)
        if np.isfinite(window.clocks.band_ms(*hosts)):
            order = window.clocks.order(hosts[0], first.time_ns, hosts[1], other.time_ns)
            lead = (other.common_ns - first.common_ns) / 1e9
            return order != "before" or lead <= policy.same_host_band_seconds
    return (other.common_ns - first.common_ns) / 1e9 <= band


def on_one_clock(window: Window, rank: int, time_ns: int) -> int:
    """Return a time of a rank's host on the clock of one of the hosts, as far as they are known."""
    clocks = window.clocks
    found = clocks.difference_ms(window.host(rank), clocks.hosts[0]) if clocks.hosts else None
    return time_ns if found is None else time_ns - int(found[0] * 1e6)


def _is_level(window: Window, first_ns: int, other_ns: int) -> bool:
    return (other_ns - first_ns) / 1e9 <= window.policy.clock_band_seconds


def _died_by_signal(failure: Failure) -> bool:
    return failure.ended is not None and failure.ended.signal in _DEADLY
