"""What of the newest steps was not recorded, on which ranks, while it was on others.

A rank of which less is known than of its peers looks unlike them for that reason alone: nothing
may be concluded from it, nor from its silence that it is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.wire.backends import HOST_WAITS_RATIO
from rankscope_server.diagnose.shared.comparison import are_typical
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import capital, percent_text, ranks_text
from rankscope_server.observe.step_table import SILENCE, StepTable

_REMEDY = "see the agent page: sources and losses of these ranks"
_PROFILE = "traces of torch.profiler, of the same steps on all ranks: rankscope import"
_OF_ONE = ("they are", "it is"), ("they waited", "it waited"), ("their ", "its ")
_NEAR_SECONDS, _NEAR_SAMPLES = 10.0, 3  # so far behind may be the newest step that devices report


@dataclass(frozen=True, slots=True)
class Gap:
    """What is not known of some ranks in a share of the newest steps."""

    ranks: tuple[int, ...]
    what: str  # "the steps"
    share: float
    remedy: str = _REMEDY

    @property
    def text(self) -> str:
        """Return it as a sentence."""
        where = "" if self.share >= 1.0 else f" in {percent_text(self.share)} of the newest steps"
        what = self.what
        if len(self.ranks) == 1:
            for many, one in _OF_ONE:
                what = what.replace(many, one)
        return f"{capital(ranks_text(self.ranks))}: {what} not known{where}"


def gaps_of(window: Window) -> tuple[Gap, ...]:
    """Return what is missing of the newest steps, the largest share first."""
    columns = _settled(window)
    found = [*_of_steps(window, columns), *_of_states(window)]
    if len(columns) and len(window.steps.ranks) > 1:
        found += _of_waits(window, columns)
        found += _of_calls(window, columns)
    found += _of_devices(window)
    return tuple(sorted(found, key=lambda gap: (-gap.share, gap.ranks)))


def _settled(window: Window) -> Array:
    """Return the newest columns without those whose records may still be on their way."""
    table, policy = window.steps, window.policy
    first = max(0, table.num_steps - policy.recent_steps)
    if not table.num_steps or not len(table.ranks):
        return np.zeros(0, np.int64)
    started = table.get("started_ms", first)
    begins = np.fmax.reduce(started, axis=0)
    newest = float(np.nanmax(begins))
    on_its_way = begins > newest - policy.silent_seconds * 1e3
    heard = min((window.heard_ns.get(rank, 0) for rank in table.ranks), default=0)
    is_over = len(window.ended) >= window.world_size
    if is_over or window.now_ns - heard > policy.silent_seconds * 1e9:
        on_its_way[:] = False
    return first + np.flatnonzero(~on_its_way)


def _of_steps(window: Window, columns: Array) -> list[Gap]:
    table = window.steps
    shares: dict[int, float] = {}
    if len(columns):
        last = int(table.steps[columns[-1]])
        columns = columns[table.steps[columns] > last - window.policy.recent_steps]
        known = np.sum(~np.isnan(table.get("duration")[:, columns]), axis=1)
        # A recording shows windows of a run on purpose, and its verdict is of these.
        between = 0 if window.facts.is_recording else _num_missing(table, columns)
        span = len(columns) + between + _num_since(window)
        shares = dict(zip(table.ranks, (1.0 - known / span).tolist(), strict=True))
    if len(columns) + table.dropped_steps >= window.policy.min_steps:
        grouped = {rank for ranks in window.groups.values() if len(ranks) > 1 for rank in ranks}
        silent = grouped & set(window.ranks) - set(table.row_of) - set(window.ended)
        shares |= dict.fromkeys(silent, 1.0)
    return _grouped(shares, "the steps are")


def _num_missing(table: StepTable, columns: Array) -> int:
    """Return how many steps among the newest no rank has reported: their time has passed too."""
    first = max(0, int(columns[0]) - 1)
    numbers = table.steps[first:]
    began = np.fmax.reduce(table.get("started_ms", first), axis=0)
    lasted = np.fmax.reduce(table.get("duration", first), axis=0)
    known = lasted[~np.isnan(lasted)]
    if not len(known):
        return 0
    skipped = np.diff(numbers) - 1  # a script may also number its steps anew
    passed = np.diff(began) - lasted[:-1]
    is_missing = (skipped > 0) & (passed > 0.5 * skipped * float(np.median(known)))
    return int(skipped[is_missing].sum())


def _num_since(window: Window) -> int:
    """Return how many steps have ended since the newest that was reported, long ago."""
    table, policy = window.steps, window.policy
    last = int(table.steps[-1])
    begins = table.get("started_ms", table.num_steps - 1)[:, 0]
    newest_ns = float(np.fmax.reduce(begins)) * 1e6
    quiet_ns = policy.silent_seconds * 1e9
    ahead = [
        state.step - 1 - last
        for state in window.states.values()
        if state.time_ns - newest_ns > quiet_ns
    ]
    return max([0, *ahead])


def _of_states(window: Window) -> list[Gap]:
    """Return which ranks never said where they are, where others did."""
    silent = set(window.ranks) | set(window.steps.row_of)
    silent -= set(window.states) | set(window.ended)
    is_reported = bool(window.states) and bool(silent)
    return _grouped(dict.fromkeys(silent, 1.0), "where they are is") if is_reported else []


def _of_waits(window: Window, columns: Array) -> list[Gap]:
    """Return whose waiting is not known, and steps that were thinned on some ranks alone."""
    table = window.steps
    known = ~np.isnan(table.get("duration")[:, columns])
    unknown = known & np.isnan(table.get("own")[:, columns])
    unknown &= table.seen()[columns]  # of the others thinning says it
    thinned = table.is_thinned()[:, columns]
    is_mixed = np.any(known & thinned, axis=0) & np.any(known & ~thinned, axis=0)
    mixed = unknown & is_mixed
    found = []
    if mixed.any():
        odd = tuple(sorted(
            rank for rank, row in table.row_of.items()
            if 2 * int(np.sum(mixed[row] & thinned[row])) > int(np.sum(mixed[row]))
        ))  # fmt: skip
        found.append(Gap(
            odd or tuple(table.ranks), "thinned in other steps than the rest: their work is",
            float(is_mixed.mean()), "give all ranks the same RANKSCOPE_OVERHEAD_PERCENT",
        ))  # fmt: skip
    blind = unknown & ~is_mixed
    shares = dict(zip(table.ranks, blind.mean(axis=1), strict=True))
    if _is_silent(window, columns):
        return [*found, Gap(tuple(table.ranks), "collectives, and who waited, are", 1.0)]
    return found + _grouped(shares, "collectives, and for how long they waited, are")


def _is_silent(window: Window, columns: Array) -> bool:
    """Return whether ranks of a group never reported a collective: then all seem to work always."""
    table, events = window.steps, window.replays.events
    if len(columns) < SILENCE or not any(len(ranks) > 1 for ranks in window.groups.values()):
        return False
    return not events.num_rows and not bool(np.any(table.get("calls") > 0))


def _of_calls(window: Window, columns: Array) -> list[Gap]:
    """Return the ranks whose single collectives are not known, where those of others are."""
    table, events = window.steps, window.replays.events
    numbers = table.steps[columns]
    kept = np.flatnonzero(numbers >= events.first_step)
    numbers = numbers[kept]
    if not len(numbers):
        return []
    seen = np.stack([events.is_seen(rank, numbers) for rank in table.ranks])
    counted = table.get("calls")[:, columns[kept]] > 0
    missing = counted & ~table.is_thinned()[:, columns[kept]] & ~seen & seen.any(axis=0)
    shares = dict(zip(table.ranks, missing.mean(axis=1), strict=True))
    return _grouped(shares, "their single collectives are")


def _of_devices(window: Window) -> list[Gap]:
    """Return the ranks whose devices wait for an unknown time: the hosts do not.

    All ranks then take the same time a step, and which of them the others wait for is not known.
    """
    table, sure = window.steps, window.sure_device_steps
    on_device = tuple(rank for rank in sorted(window.ranks) if window.runs_on_device(rank))
    if len(on_device) < 2 or not table.num_steps or window.facts.is_recording:
        return []
    first = max(0, table.num_steps - window.policy.recent_steps)
    is_known = len(sure) >= window.policy.min_steps and _are_near(window) and are_typical(window)
    rows = [table.row_of[rank] for rank in on_device if rank in table.row_of]
    with np.errstate(invalid="ignore"):
        waited = table.get("blocked", first)[rows] / table.get("duration", first)[rows]
    is_seen = bool((median(waited.astype(float), 1) > HOST_WAITS_RATIO).any())
    has_calls = bool((table.get("calls", first)[rows] > 0).any())
    if is_known or is_seen or not has_calls:
        return []
    return [Gap(on_device, "what their devices waited for is", 1.0, _PROFILE)]


def _are_near(window: Window) -> bool:
    """Return whether devices have reported the newest steps, or those just before."""
    steps, sure = window.steps.steps, np.unique(window.sure_device_steps)
    apart = float(np.median(np.diff(sure)))
    if steps[-1] - sure[-1] <= _NEAR_SAMPLES * apart:
        return True
    at = int(np.searchsorted(steps, sure[-1]))
    started_ms = median(window.steps.get("started_ms")[:, [min(at, len(steps) - 1), -1]], 0)
    behind_s = float(started_ms[1] - started_ms[0]) / 1e3
    return behind_s <= _NEAR_SECONDS


def without_calls(window: Window, ranks: Iterable[int], columns: slice) -> list[int]:
    """Return which of some ranks have no single collectives in columns where others have them."""
    table, events, limit = window.steps, window.replays.events, window.policy.max_missing_share
    begin = max(columns.start, columns.stop - window.policy.replay_steps)
    numbers = table.steps[begin : columns.stop]
    seen = {rank: events.is_seen(rank, numbers) for rank in table.ranks}
    is_seen = np.any(list(seen.values()), axis=0)
    if not is_seen.any():
        return []
    return [rank for rank in ranks if float(np.mean(~seen[rank][is_seen])) > limit]


def _grouped(shares: Mapping[int, float], what: str) -> list[Gap]:
    """Return one gap for the ranks that miss about as much as the worst, one for the others."""
    worst = max(shares.values(), default=0.0)
    found = []
    for low, high in ((worst / 2, worst), (0.0, worst / 2)):
        ranks = sorted(rank for rank, share in shares.items() if low < share <= high)
        if ranks:
            found.append(Gap(tuple(ranks), what, float(max(shares[rank] for rank in ranks))))
    return found
