"""Replays of the newest steps of an attempt, made once per block of steps and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rankscope.wire.schema import RankRegistered
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median
from rankscope_server.observe.event_table import EventTable
from rankscope_server.observe.step_table import StepTable
from rankscope_server.replay.recorded_program import (
    NoReplay,
    Program,
    programs_of,
    replay_of_programs,
)
from rankscope_server.replay.replay import Replay

T = TypeVar("T")
_KEPT = 4
_LARGE_ROWS = 300_000  # of a block: to go through it takes a fifth of a second
_MOST_ROWS = 800_000  # memory for 100 MB of them, for a moment
# So that is done once in so many seconds, or in so many blocks where steps are quick; at first
# after each doubling, so that something is known soon.
_RARELY_SECONDS, _MOST_BLOCKS = 60.0, 16


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps of a step table, apart from it: the table may change meanwhile."""

    numbers: Array
    ranks: list[int]
    started_ms: Array  # ranks x steps, as the next two
    duration_ms: Array
    blocked_ms: Array
    has_thinned: bool  # there are steps in the table that no rank recorded whole

    @classmethod
    def of(cls, steps: StepTable, columns: Array) -> Block:
        """Take some columns of a table."""
        started, duration = (
            np.asarray(steps.get(name)[:, columns], np.float64)
            for name in ("started_ms", "duration")
        )
        return cls(
            steps.steps[columns], list(steps.ranks), started, duration,
            steps.get("blocked")[:, columns], bool(steps.thinned().any()),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deferred:
    """What is to be made of a block of steps, in any thread: it rests on nothing that changes."""

    kind: str
    numbers: Array
    also: Hashable
    num_rows: int
    make: Callable[[], Any]


class ReplayTable:
    """What was recorded of operations, and replays made of it.

    Where it `defers`, what a large block of steps would cost a look, half a second of it, is left
    to the caller of `take_deferred`; until that is made a look has what was made of the block
    before.
    """

    def __init__(self) -> None:
        self.events = EventTable()
        self.defers = False
        # what was made, by what it rests on, and of how many rows
        self._kept: dict[tuple[str, bytes, Hashable], tuple[int, Any]] = {}
        self._latest: dict[str, Array] = {}  # of each kind the steps of its newest block
        self._waiting: dict[str, Deferred] = {}
        self._under_way: set[str] = set()  # kinds

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}, "_latest": {}, "_waiting": {}, "_under_way": set()}

    def newest(
        self,
        steps: StepTable,
        ranks: Mapping[int, RankRegistered],
        groups: Mapping[tuple[int, str], tuple[int, ...]],
        policy: Policy,
    ) -> tuple[Replay, list[Program]]:
        """Return the replay of the newest whole block of steps, and its programs.

        A new one is made when half a block is new, at first more often, and of large blocks rarer
        (`paced`). Raises NoReplay.
        """
        total, size = steps.num_steps + steps.dropped_steps, self.block_size(steps, policy)
        stride = size // (2 if total > size // 2 else 16)
        stop = steps.num_steps - total % self.paced(stride, size, steps)
        begin = begin_of(steps, stop, size)

        def prepare(columns: Array) -> Callable[[], tuple[Replay, list[Program]] | str]:
            return self._to_make(columns, steps, ranks, groups, policy)

        columns = usable_columns(steps, begin, stop, policy)
        _, found = self.latest("replay", columns, steps, tuple(steps.ranks), prepare)
        return _made(found)

    def latest(
        self, kind: str, columns: Array, steps: StepTable, also: Hashable,
        prepare: Callable[[Array], Callable[[], T]],
    ) -> tuple[Array, T]:  # fmt: skip
        """Return the columns of the step table that were read, and what was made of them.

        These columns, or the ones of the call before while they are deferred. `prepare` returns
        what makes it, without the tables. `also` is what else it rests on.
        """
        numbers, before = steps.steps[columns], self._latest.get(kind)
        key, num_rows = (kind, numbers.tobytes(), also), self.events.count(numbers)
        is_made = key in self._kept and self._kept[key][0] >= num_rows
        if self.defers and not is_made and num_rows > _LARGE_ROWS and before is not None:
            known = self._kept.get((kind, before.tobytes(), also))
            places = np.searchsorted(steps.steps, before)
            if known is not None and np.isin(before, steps.steps).all():
                if kind not in self._under_way:
                    make = prepare(columns)
                    self._waiting[kind] = Deferred(kind, numbers, also, num_rows, make)
                return places, known[1]
        self._latest[kind] = numbers
        return columns, self.made_of(kind, numbers, also, lambda: prepare(columns)())

    def made_of(self, kind: str, numbers: Array, also: Hashable, make: Callable[[], T]) -> T:
        """Return what was made of steps, anew where they have more rows since then.

        They have fewer where the table had to drop some: what was made of all of them holds.
        """
        key, num_rows = (kind, numbers.tobytes(), also), self.events.count(numbers)
        known = self._kept.pop(key, None)
        if known is None or known[0] < num_rows:
            known = num_rows, make()
        self._keep(key, known)
        made: T = known[1]
        return made

    def _keep(self, key: tuple[str, bytes, Hashable], known: tuple[int, Any]) -> None:
        self._kept[key] = known
        while len(self._kept) > _KEPT:
            self._kept.pop(next(iter(self._kept)))

    def take_deferred(self) -> list[Deferred]:
        """Return what is to be made now, once; it is handed back to `adopt`."""
        waiting, self._waiting = self._waiting, {}
        self._under_way.update(waiting)
        return list(waiting.values())

    def adopt(self, what: Deferred, made: object) -> None:
        """Take what was made: the next look sees it."""
        self._under_way.discard(what.kind)
        self._keep((what.kind, what.numbers.tobytes(), what.also), (what.num_rows, made))
        self._latest[what.kind] = what.numbers

    def give_up(self, what: Deferred) -> None:
        """Forget what could not be made: a later look asks for it again."""
        self._under_way.discard(what.kind)

    def block_size(self, steps: StepTable, policy: Policy) -> int:
        """Return of how many steps a replay is made: of fewer where they are large."""
        size = policy.replay_steps
        a_step = self.events.most_rows(steps.steps[-size:])
        while size * a_step > _MOST_ROWS and size // 2 >= policy.replay_min_steps:
            size //= 2
        return size

    def paced(self, stride: int, size: int, steps: StepTable) -> int:
        """Return after how many steps to look at `size` steps again; rarer where they are large."""
        newest = steps.steps[-size:]
        if not len(newest) or self.events.count(newest) <= _LARGE_ROWS:
            return stride
        step_ms = np.nanmedian(steps.get("duration")[steps.some_rows(), -size:])
        most = min(_MOST_BLOCKS, (steps.num_steps + steps.dropped_steps) // size)
        blocks = 1
        while 2 * blocks <= most and 2 * blocks * size * step_ms / 1e3 <= _RARELY_SECONDS:
            blocks *= 2
        return max(stride, blocks * size)

    def of(
        self,
        columns: Array,
        steps: StepTable,
        ranks: Mapping[int, RankRegistered],
        groups: Mapping[tuple[int, str], tuple[int, ...]],
        policy: Policy,
    ) -> tuple[Replay, list[Program]]:
        """Return the replay of some columns of the step table. Raises NoReplay."""
        numbers = steps.steps[columns]

        def make() -> tuple[Replay, list[Program]] | str:
            return self._to_make(columns, steps, ranks, groups, policy)()

        return _made(self.made_of("replay", numbers, tuple(steps.ranks), make))

    def _to_make(
        self,
        columns: Array,
        steps: StepTable,
        ranks: Mapping[int, RankRegistered],
        groups: Mapping[tuple[int, str], tuple[int, ...]],
        policy: Policy,
    ) -> Callable[[], tuple[Replay, list[Program]] | str]:
        """Return what makes a replay, or why there is none, of what is known now."""
        block, events = Block.of(steps, columns), self.events.snapshot()
        return partial(_tried, block, events, dict(ranks), dict(groups), policy)


def _tried(
    block: Block,
    events: EventTable,
    registered: Mapping[int, RankRegistered],
    groups: Mapping[tuple[int, str], tuple[int, ...]],
    policy: Policy,
) -> tuple[Replay, list[Program]] | str:
    """Return a replay, or why there is none: an exception would keep all it was found in."""
    try:
        return _make(block, events, registered, groups, policy)
    except NoReplay as error:
        return str(error)


def _make(
    block: Block,
    events: EventTable,
    registered: Mapping[int, RankRegistered],
    groups: Mapping[tuple[int, str], tuple[int, ...]],
    policy: Policy,
) -> tuple[Replay, list[Program]]:
    if not events.num_rows:
        raise NoReplay("no collectives are recorded")
    if any("nccl" in known.backend for known in registered.values()):
        raise NoReplay("on NCCL the host does not say when a rank waits")
    if len(block.numbers) < policy.replay_min_steps:
        which = " that are whole on all ranks" if block.has_thinned else ""
        raise NoReplay(f"needs {policy.replay_min_steps} steps{which}, has {len(block.numbers)}")
    ranks, numbers = block.ranks, block.numbers
    rows = events.select(numbers)
    said = [max(0, registered[r].stage) if r in registered else 0 for r in ranks]
    # A rank that owns several stages says one of them: only their order counts.
    stage = np.unique(said, return_inverse=True)[1]
    words, operations = events.words("group"), events.words("operation")
    programs = programs_of(
        rows, operations, ranks, numbers, block.started_ms, block.duration_ms, stage
    )
    _check_waits(programs, block.blocked_ms, policy)
    defined = {word: members for (_, word), members in groups.items()}
    members = {
        (rank, number): known
        for number, word in enumerate(words)
        for rank in ranks
        # A rank whose own word of the group is missing is in the one that counts it.
        if (known := groups.get((rank, word), defined.get(word))) and rank in known
    }
    replay, programs = replay_of_programs(
        programs,
        ranks=ranks,
        steps=numbers,
        stage=stage,
        step_ms=median(block.duration_ms, 0),
        operations=operations,
        members=members,
    )
    _check(replay, policy)
    return replay, programs


def _made(found: tuple[Replay, list[Program]] | str) -> tuple[Replay, list[Program]]:
    """Return a replay. Raises NoReplay where there is none."""
    if isinstance(found, str):
        raise NoReplay(found)
    return found


def begin_of(steps: StepTable, stop: int, count: int) -> int:
    """Return from where on `count` columns before `stop` were recorded whole by all ranks."""
    whole = np.flatnonzero(~steps.thinned()[:stop])
    return int(whole[-count]) if len(whole) >= count else 0


def usable_columns(steps: StepTable, begin: int, stop: int, policy: Policy) -> Array:
    """Return the columns in a range that most ranks have ended, without special or thinned ones."""
    whole = ~steps.thinned(begin)[: stop - begin]
    known = ~np.isnan(steps.get("duration", begin)[:, : stop - begin])
    enough = np.mean(known, axis=0) >= 1.0 - policy.max_missing_share if len(known) else known
    return begin + np.flatnonzero(enough & whole & ~steps.special(begin)[: stop - begin])


def _check_waits(programs: Sequence[Program], blocked_ms: Array, policy: Policy) -> None:
    """Raise NoReplay unless the waits of operations are the time that ranks were blocked."""
    waited, total = 0.0, 0.0
    for program in programs:
        known = ~np.isnan(program.issued[..., 0]) & ~np.isnan(blocked_ms[program.rows])
        waited += float(np.nansum(program.blocked[known]))
        total += float(np.nansum(blocked_ms[program.rows][known]))
    if abs(waited - total) > policy.replay_blocked_ratio * max(waited, total):
        raise NoReplay(
            f"the waits of single operations hold {100 * waited / max(total, 1e-9):.0f} % of the "
            "time for which ranks were blocked"
        )


def _check(replay: Replay, policy: Policy) -> None:
    if replay.missing_share > policy.max_missing_share:
        raise NoReplay(f"{100 * replay.missing_share:.0f} % of the operations are missing")
    error = replay.error_ratio()
    if not abs(error) <= policy.replay_error_ratio:
        raise NoReplay(
            f"a replay of what was recorded misses the recorded steps by {100 * error:+.1f} %"
        )
