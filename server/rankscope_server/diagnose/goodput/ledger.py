"""The goodput ledger: where the wall time of all ranks of a run went; it sums to the wall time.

Every rank's time from the first sign of the run to its end, or to now, is cut into parts, attempt
by attempt. Steps that a later attempt did again are lost with all their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.wire.schema import STEP_CHECKPOINT, STEP_FIRST, STEP_WAITS_UNKNOWN
from rankscope_server.observe.resume import Start, first_done_again
from rankscope_server.observe.step_table import StepTable
from rankscope_server.observe.time_sums import RankTime

PARTS: tuple[str, ...] = (
    "productive", "communication and waiting", "data", "checkpoint", "evaluation", "start-up",
    "first steps", "lost work", "stuck or failing", "restart", "after the end", "not recorded",
)  # fmt: skip
KEPT = ("productive", "communication and waiting", "data", "evaluation")  # of steps that count
_OF_SUM = {"productive": "productive", "blocked": "communication and waiting", "data": "data",
           "checkpoint": "checkpoint", "evaluation": "evaluation"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LedgerAttempt:
    """What the ledger needs of one attempt. Times by rank, ns of wall clock."""

    number: int
    came_up_ns: dict[int, int]
    ended_ns: dict[int, int]
    is_clean: bool  # all ranks ended cleanly
    sums: dict[int, RankTime]
    steps: StepTable
    start: Start | None = None  # None before its first step
    launched_ns: int = 0  # of the launcher, 0 where there is none
    left_ns: int = 0  # when its command ended, 0 while it runs
    is_stuck: bool = False  # no rank gets further


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds of all ranks together by part; they add up to `wall_seconds`."""

    parts: dict[str, float]
    wall_seconds: float
    num_ranks: int
    num_attempts: int
    lost_steps: int

    def share(self, part: str) -> float:
        """Return a part's share of the wall time."""
        return self.parts[part] / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def ettr(self) -> float:
        """Return Meta's effective training time ratio: time in steps that are kept (2410.21680)."""
        return sum(self.share(name) for name in KEPT)


@dataclass(slots=True)
class _Sum:
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, part: str, ns: float) -> float:
        """Add a part, at least 0; return what was added."""
        amount = max(0.0, float(ns))
        self.parts[part] += amount
        return amount


def ledger_of_attempts(attempts: Sequence[LedgerAttempt], now_ns: int) -> Ledger | None:
    """Return the ledger of a run; None before its first step."""
    attempts = [attempt for attempt in attempts if attempt.came_up_ns]
    if not any(attempt.sums for attempt in attempts):
        return None
    ranks = sorted(set().union(*(attempt.came_up_ns for attempt in attempts)))
    began = min(min(attempt.came_up_ns.values()) for attempt in attempts)
    launched = [attempt.launched_ns for attempt in attempts if attempt.launched_ns]
    began = min([began, *launched])
    last = attempts[-1]
    over = len(last.ended_ns) >= len(last.came_up_ns)
    left = max(attempt.left_ns for attempt in attempts)
    ended = max([left, *last.ended_ns.values()]) if over else now_ns
    again, waits = _done_again(attempts), [_waits_for_saves_ns(attempt) for attempt in attempts]
    total, lost_steps = _Sum(), 0
    for rank in ranks:
        at, lost_of_rank = began, 0
        for index, one in enumerate(attempts):
            before = total.add("start-up" if index == 0 else "restart",
                               one.came_up_ns.get(rank, at) - at)  # fmt: skip
            at, lost = _of_rank(total, one, rank, at + int(before), ended, again[index],
                                waits[index].get(rank, 0.0))  # fmt: skip
            lost_of_rank += lost
        lost_steps = max(lost_steps, lost_of_rank)
        total.add("after the end" if over else "not recorded", ended - at)
    wall = (ended - began) * len(ranks)
    excess = sum(total.parts.values()) - wall
    _take_off(total, excess)
    return Ledger(
        {name: value / 1e9 for name, value in total.parts.items()}, wall / 1e9, len(ranks),
        len(attempts), lost_steps,
    )  # fmt: skip


def _done_again(attempts: Sequence[LedgerAttempt]) -> list[int | None]:
    """Return for each attempt the first step that a later one did again."""
    starts = [attempt.start for attempt in attempts]
    return [
        first_done_again(start, [resumed for resumed in starts[at + 1 :] if resumed is not None])
        if start is not None else None
        for at, start in enumerate(starts)
    ]  # fmt: skip


def _of_rank(
    total: _Sum, attempt: LedgerAttempt, rank: int, at: int, ended: int, next_step: int | None,
    wait_for_saves_ns: float,
) -> tuple[int, int]:  # fmt: skip
    """Add one rank's time since it came up in one attempt; return until when, and lost steps."""
    came_up = attempt.came_up_ns.get(rank)
    if came_up is None:
        return at, 0  # this rank was not part of it: its time counts with the next attempt
    end = min(attempt.ended_ns.get(rank, ended), ended)
    sums = attempt.sums.get(rank)
    if sums is None or not sums.num_steps:
        total.add("start-up", end - came_up)
        return max(end, came_up), 0
    total.add("start-up", sums.first_start_ns - came_up)
    inside = sums.last_end_ns - sums.first_start_ns
    lost_steps, lost = _lost(attempt, rank, sums, next_step)
    values = _parts_of(sums, wait_for_saves_ns)
    for part in ("start-up", "first steps"):
        total.add(part, values.pop(part))
    unseen = values["productive"] * _unseen_share(attempt.steps, rank)
    values["productive"] -= total.add("not recorded", unseen)
    waits = min(_hidden_waits(attempt.steps, rank, values), values["productive"])
    values["productive"] -= waits
    values["blocked"] += waits
    for name, part in _OF_SUM.items():
        gone = min(lost.get(name, 0.0), values[name])
        total.add(part, values[name] - gone)
        total.add("lost work", gone)
    total.add("not recorded", inside - sum(sums.parts.values()))
    tail = end - sums.last_end_ns
    is_running = rank not in attempt.ended_ns
    clean = attempt.is_clean or is_running
    total.add("stuck or failing" if attempt.is_stuck or not clean else
              "not recorded" if is_running else "after the end", tail)  # fmt: skip
    return max(end, sums.last_end_ns), lost_steps


def _unseen_share(table: StepTable, rank: int) -> float:
    """Return in which share of its steps a rank's waits were not recorded: they look like work."""
    row = table.row_of.get(rank)
    if row is None or not table.num_steps:
        return 0.0
    unseen = np.isnan(table.get("own")[row])
    if not unseen.any():
        return 0.0
    unseen &= table.get("calls")[row] == 0
    return float(unseen.sum()) / max(1, int(np.sum(~np.isnan(table.get("duration")[row]))))


def _hidden_waits(table: StepTable, rank: int, values: Mapping[str, float]) -> float:
    """Return how much of a rank's work is waiting that thinned steps did not see, ns.

    All its steps are taken to wait as much as those whose waits were seen.
    """
    row = table.row_of.get(rank)
    if row is None:
        return 0.0
    seen = (table.flags()[row] & STEP_WAITS_UNKNOWN) == 0
    if seen.all():
        return 0.0
    own, blocked = (float(np.nansum(table.get(name)[row][seen])) for name in ("own", "blocked"))
    if own + blocked == 0.0:
        return 0.0
    work_and_waits = values["productive"] + values["blocked"]
    return max(0.0, blocked / (own + blocked) * work_and_waits - values["blocked"])


def _parts_of(sums: RankTime, wait_for_saves_ns: float) -> dict[str, float]:
    """Return the parts of a rank's steps, ns; what first steps and saves take is taken out.

    A first step begins with the rank's first word, so it holds the building of the model, reading
    the checkpoint and compiling. What it has beyond others is start-up where it is outside of
    forward, backward and optimizer or waits for ranks that are not so far; what else there is may
    be either, as the agent takes all before a backward for a forward where it sees no data loader.
    What steps that save have beyond others is saving too: scripts copy, sync and rename beside the
    call that is timed, and wait for the rank that writes.
    """
    parts: dict[str, float] = dict(sums.parts)
    slow = sums.beyond_usual("productive", first=True)
    setting_up = min(slow, float(sums.first_other_ns))
    waiting = sums.beyond_usual("blocked", first=True)
    found = {"start-up": setting_up + waiting, "first steps": slow - setting_up}
    parts["productive"] -= slow
    parts["blocked"] -= waiting
    if sums.num_saving:
        beside = {name: min(parts[name], sums.beyond_usual(name, first=False))
                  for name in ("productive", "blocked")}  # fmt: skip
    else:
        beside = {"blocked": min(parts["blocked"], wait_for_saves_ns)}
    for name, value in beside.items():
        parts[name] -= value
        parts["checkpoint"] += value
    return parts | found


def _waits_for_saves_ns(attempt: LedgerAttempt) -> dict[int, float]:
    """Return how much longer ranks that save nothing wait in steps in which others save."""
    waiting = [rank for rank in attempt.steps.row_of if rank in attempt.sums
               and not attempt.sums[rank].num_saving]  # fmt: skip
    if not waiting or not any(sums.num_saving for sums in attempt.sums.values()):
        return {}
    flags, table = attempt.steps.flags(), attempt.steps
    saves = np.any(flags & STEP_CHECKPOINT != 0, axis=0) & ~np.any(flags & STEP_FIRST != 0, axis=0)
    usual = ~table.special()
    if not saves.any() or not usual.any():
        return {}
    rows = [table.row_of[rank] for rank in waiting]
    blocked = np.asarray(table.get("blocked")[rows], np.float64)
    known = ~np.isnan(blocked)
    blocked[~known] = 0.0
    mean = blocked[:, usual].sum(1) / np.maximum(known[:, usual].sum(1), 1)
    beyond = blocked[:, saves].sum(1) - mean * known[:, saves].sum(1)
    counts = np.array([attempt.sums[rank].num_steps for rank in waiting])
    whole = np.maximum(beyond, 0.0) * 1e6 * counts / np.maximum(known.sum(1), 1)
    return dict(zip(waiting, whole.tolist(), strict=True))


def _lost(
    attempt: LedgerAttempt, rank: int, sums: RankTime, next_step: int | None
) -> tuple[int, dict[str, float]]:
    """Return how many of a rank's steps a later attempt did again, and their parts in ns."""
    if next_step is None or next_step > sums.last_step:
        return 0, {}
    count = sums.last_step - max(next_step, sums.first_step) + 1
    table = attempt.steps
    row = table.row_of.get(rank)
    if row is None or not table.num_steps or int(table.steps[0]) > next_step:
        share = count / max(sums.num_steps, 1)  # they have left the table: as all steps are
        return count, {name: share * value for name, value in sums.parts.items()}
    again = table.steps >= next_step
    ms = {name: float(np.nansum(table.get(name)[row, again]))
          for name in ("duration", "own", "blocked", "data")}  # fmt: skip
    return count, {
        "productive": 1e6 * (ms["own"] - ms["data"]),
        "blocked": 1e6 * ms["blocked"],
        "data": 1e6 * ms["data"],
        "checkpoint": 1e6 * max(0.0, ms["duration"] - ms["own"] - ms["blocked"]),
    }


def _take_off(total: _Sum, excess: float) -> None:
    """Take what clocks and doubled edges made too much from what is least certain."""
    if excess < 0:
        total.parts["not recorded"] -= excess
        return
    for name in ("not recorded", "after the end", "stuck or failing", "start-up", "restart",
                 "communication and waiting", "productive"):  # fmt: skip
        taken = min(excess, total.parts[name])
        total.parts[name] -= taken
        excess -= taken
