"""Which level of thinning the ranks of a run should agree on, where one node cannot tell alone."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.wire.schema import RankRegistered, RankState


def level_to_ask(
    ranks: Mapping[int, RankRegistered], states: Mapping[int, RankState], world_size: int
) -> int | None:
    """Return the level that all ranks should take, None where there is nothing to ask.

    The highest that any of them needs. Ranks of one node are asked by its collector; a run with
    a rank that does not report is left as it is, since what it needs is not known.
    """
    if len({known.host for known in ranks.values()}) < 2:
        return None
    alive = [state for state in states.values() if state.alive]
    if len(alive) < world_size:
        return None
    wanted = max(state.thinning_wanted for state in alive)
    return None if all(state.thinning == wanted for state in alive) else wanted
