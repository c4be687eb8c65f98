"""What a slow rank costs, from a replay of the steps without its excess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.window import Window
from rankscope_server.replay.recorded_program import NoReplay
from rankscope_server.replay.replay_table import begin_of, usable_columns


@dataclass(frozen=True, slots=True)
class Replayed:
    """The share of throughput that ranks take, or why a replay cannot tell."""

    ratio: float | None
    text: str


def near_rows(window: Window, rows: Sequence[int]) -> list[int]:
    """Return the other rows of the step table whose ranks share a host with these."""
    table = window.steps
    hosts = set(window.hosts([table.ranks[row] for row in rows]))
    return [
        row
        for row, rank in enumerate(table.ranks)
        if row not in rows and window.host(rank) in hosts
    ]


def replayed(
    window: Window, scales: Mapping[int, float], columns: slice, near_change: float
) -> Replayed:
    """Return what some rows of the step table cost in the last of these columns.

    `scales` says by row by what its work is multiplied where it has no peers. Without these rows
    the ranks of their hosts would work as long as before: 1 / `near_change` times.
    """
    policy, table = window.policy, window.steps
    stride = policy.replay_steps // 2
    stop = columns.stop
    if (
        begin_of(table, stop, policy.replay_steps) > columns.start
    ):  # else every look would need another replay
        stop -= (stop + table.dropped_steps) % stride
    begin = max(columns.start, begin_of(table, stop, policy.replay_steps))
    chosen = usable_columns(table, begin, stop, policy)
    try:
        replay, _ = window.replays.of(chosen, table, window.ranks, window.groups, policy)
    except NoReplay as error:
        return Replayed(None, str(error))
    rows = list(scales)
    with_ms = replay.mean_step_ms()
    slower = dict.fromkeys([*rows, *near_rows(window, rows)], 1.0 / near_change)
    without_ms = replay.step_without_ms(rows, scales, slower)
    ratio = throughput_loss(with_ms, without_ms)
    return Replayed(
        ratio,
        f"a replay of {len(replay.steps)} steps that gives back the recorded ones within "
        f"{100 * abs(replay.error_ratio()):.1f} %",
    )
