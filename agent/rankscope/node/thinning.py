"""Agrees how much the ranks of a run record, where all of them are on this node.

Each rank says in its header which level of thinning it needs. The highest takes effect in all of
them before the same step, some seconds ahead, so that they stay comparable. Ranks on several
nodes are asked by the server, which alone sees them all. What a server asks for that does not keep
up stays in force beside it: a rank takes the higher level of the two.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rankscope.node.processes.stacks import Look
from rankscope.wire.schema import Command

AHEAD_SECONDS = 3.0  # a rank looks for requests once a second
LEAST_AHEAD_STEPS = 3
_PATIENCE_SECONDS = 30.0  # then it is asked again
_NEWEST = 5  # looks, a second apart, that give the pace


@dataclass
class _Asked:
    level: int
    deadline: float


class Agreement:
    """Asks the ranks of each attempt for one level. `turn` once a second."""

    def __init__(
        self,
        ask: Callable[[list[Command]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: dict[int, _Asked] = {}
        self._steps: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._next_id = -time.time_ns() // 1000  # below zero: no command of a server's

    def turn(self, looks: Iterable[tuple[int, int, Look]]) -> None:
        """Take in (attempt, rank, look) of all ranks that live here; ask where it is due."""
        attempts: dict[int, dict[int, Look]] = defaultdict(dict)
        for attempt, rank, look in looks:
            attempts[attempt][rank] = look
        for attempt, ranks in attempts.items():
            self._turn(attempt, ranks)

    def _turn(self, attempt: int, ranks: dict[int, Look]) -> None:
        now = self._clock()
        step = max(look.step for look in ranks.values())
        seen = self._steps[attempt]
        seen.append((now, step))
        del seen[:-_NEWEST]
        if len(ranks) < max(look.world_size for look in ranks.values()):
            return  # some are elsewhere, or gone
        levels = {look.thinning for look in ranks.values()}
        servers = max(look.thinning_asked for look in ranks.values())
        asked = self._asked.get(attempt)
        if asked is not None and levels != {max(asked.level, servers)} and now < asked.deadline:
            return  # one agreement after the other
        self._asked.pop(attempt, None)
        wanted = max(look.thinning_wanted for look in ranks.values())
        if levels == {max(wanted, servers)}:
            return
        seconds, steps = now - seen[0][0], step - seen[0][1]
        pace = steps / seconds if seconds > 0 else 0.0
        at_step = step + max(LEAST_AHEAD_STEPS, round(AHEAD_SECONDS * pace))
        self._asked[attempt] = _Asked(wanted, now + _PATIENCE_SECONDS)
        self._next_id -= 1
        self._ask([
            Command(
                id=self._next_id, kind="thin", attempt=attempt, ranks=sorted(ranks),
                asked_by="budget", expires_in_seconds=_PATIENCE_SECONDS, level=wanted,
                at_step=at_step, is_everyone=True,
            )
        ])  # fmt: skip
