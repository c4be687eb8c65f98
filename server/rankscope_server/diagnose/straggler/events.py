"""Episodes that belong together, and which of their ranks have been slow for long enough.

Ranks that one cause makes slow begin together; what began on most of them is the whole job's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import middle
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.episodes import Episode
from rankscope_server.observe.step_table import StepTable


def events_of(
    episodes: Sequence[Episode], deviation: Deviation, policy: Policy
) -> list[list[Episode]]:
    """Group episodes that began together: ranks that one cause makes slow."""
    place = np.cumsum(deviation.seen)  # of a column, among those whose waits are known
    events: list[list[Episode]] = []
    for episode in sorted(episodes, key=lambda episode: (episode.first, episode.row)):
        near = [
            event
            for event in events
            if abs(place[episode.first] - place[event[0].first]) <= policy.short_window
            and abs(place[episode.last] - place[event[0].last]) <= policy.long_window
        ]
        if near:
            near[-1].append(episode)
        else:
            events.append([episode])
    return events


def without_global(
    events: list[list[Episode]], deviation: Deviation, policy: Policy
) -> tuple[list[list[Episode]], list[str]]:
    """Leave out what began on so many ranks at once that the others are no reference."""
    kept, notes = [], []
    for event in events:
        rows = {episode.row for episode in event}
        has_peers = all(deviation.peers[row] for row in rows)
        share = policy.peers_share if has_peers else policy.global_share
        is_of_many = len(rows) > 1 and len(rows) > share * len(deviation.roles)
        if is_of_many and (has_peers or not _are_others_as_before(event, deviation, policy)):
            notes.append(f"{len(rows)} ranks became slower together: no rank is accused")
        else:
            kept.append(event)
    return kept, notes


def _are_others_as_before(event: Sequence[Episode], deviation: Deviation, policy: Policy) -> bool:
    """Return whether a third of all ranks did not become slower with them: it is not the job."""
    columns = slice(min(s.first for s in event), max(s.last for s in event) + 1)
    others = set(range(len(deviation.roles))) - {episode.row for episode in event}
    least = (1 - policy.same_size_share) * min(episode.size for episode in event)
    as_before = [row for row in others if middle(deviation.own.raw[row, columns]) <= least]
    return 3 * len(as_before) >= len(deviation.roles)


def each_proved(table: StepTable, event: list[Episode], policy: Policy) -> list[list[Episode]]:
    """Part the ranks of an event that would be accused alone from those that would not.

    A healthy one with a few uneven steps must not be accused beside one that is slow.
    """
    lasting = [episode for episode in event if lasts(table, episode, policy)]
    other = [episode for episode in event if episode not in lasting]
    return [part for part in (lasting, other) if part]


def lasts(table: StepTable, episode: Episode, policy: Policy) -> bool:
    """Return whether an episode is long enough, in steps and time, and slow in nearly each step."""
    steps, seconds = _num_known(table, episode), seconds_of(table, episode.columns)
    is_huge = episode.size >= np.log(policy.huge_ratio)
    least = policy.huge_steps if is_huge else policy.persistent_steps
    return episode.consistent >= policy.consistent_share and (
        (steps >= least and seconds >= policy.persistent_seconds)
        or (
            steps >= policy.clear_steps
            and seconds >= policy.clear_seconds
            and episode.strength >= policy.clear_strength
        )
    )


def _num_known(table: StepTable, episode: Episode) -> int:
    """Return how many steps of an episode count: all but those whose waits were not recorded."""
    return int(np.sum(table.seen()[episode.columns]))


def seconds_of(table: StepTable, columns: slice) -> float:
    """Return how long these steps took, with those between them where only some are sampled."""
    times_ms = np.nanmax(np.nan_to_num(table.get("duration")[:, columns]), 0)
    recorded_ms, numbers = float(np.nansum(times_ms)), table.steps[columns]
    if len(numbers) < 2:
        return recorded_ms / 1e3
    started_ms = np.fmin.reduce(table.get("started_ms")[:, columns], axis=0)
    passed_ms = float(np.nan_to_num(started_ms[-1] - started_ms[0])) + float(times_ms[-1])
    sampled_ms = recorded_ms * float(np.median(np.diff(numbers)))
    return max(recorded_ms, min(passed_ms, sampled_ms)) / 1e3
