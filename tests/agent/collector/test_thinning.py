"""The collector agrees one level of thinning for all ranks of a run that is on its node alone."""

from __future__ import annotations

from dataclasses import replace

from rankscope.node.processes.stacks import Look
from rankscope.node.thinning import LEAST_AHEAD_STEPS, Agreement
from rankscope.wire.schema import Command

STILL = Look(
    pid=1, start_ticks=0, stack_signal=0, ended=0, heartbeat_ns=0, oldest_open_ns=0,
    oldest_inside_ns=0, world_size=2,
)  # fmt: skip


class Ranks:
    """Two ranks that take a level when they come to its step."""

    def __init__(self, *wanted: int, pace: int = 10) -> None:
        self.now, self.step, self.pace = 100.0, 50, pace
        self.looks = [replace(STILL, thinning_wanted=level) for level in wanted]
        self.asked: list[Command] = []
        self.agreement = Agreement(self.asked.extend, lambda: self.now)

    def second(self) -> None:
        self.now, self.step = self.now + 1, self.step + self.pace
        levels = [one.level for one in self.asked if one.at_step <= self.step]
        own = levels[-1] if levels else 0
        self.looks = [
            replace(look, step=self.step, thinning=max(own, look.thinning_asked))
            for look in self.looks
        ]
        self.agreement.turn((0, rank, look) for rank, look in enumerate(self.looks))


def test_nothing_is_asked_while_every_budget_is_kept() -> None:
    ranks = Ranks(0, 0)
    for _ in range(20):
        ranks.second()
    assert not ranks.asked


def test_the_highest_need_is_asked_of_all_before_the_same_later_step() -> None:
    ranks = Ranks(0, 0)
    for _ in range(3):
        ranks.second()
    ranks.looks[1] = replace(ranks.looks[1], thinning_wanted=3)
    step = ranks.step
    for _ in range(20):
        ranks.second()
    (command,) = ranks.asked
    assert (command.kind, command.level, command.ranks) == ("thin", 3, [0, 1])
    assert command.is_everyone
    assert command.id < 0
    assert command.at_step >= step + 3 * ranks.pace  # ranks look for requests once a second
    assert {look.thinning for look in ranks.looks} == {3}


def test_less_is_asked_for_when_no_rank_needs_more() -> None:
    ranks = Ranks(2, 4)
    for _ in range(10):
        ranks.second()
    ranks.looks = [replace(look, thinning_wanted=1) for look in ranks.looks]
    for _ in range(10):
        ranks.second()
    assert [command.level for command in ranks.asked] == [4, 1]


def test_what_a_server_asks_for_stays_beside_what_budgets_need() -> None:
    ranks = Ranks(2, 1)
    for _ in range(10):
        ranks.second()
    assert [command.level for command in ranks.asked] == [2]
    ranks.looks = [replace(look, thinning_asked=4) for look in ranks.looks]
    for _ in range(60):
        ranks.second()
    ranks.looks = [replace(look, thinning_wanted=0) for look in ranks.looks]
    for _ in range(60):
        ranks.second()
    assert [command.level for command in ranks.asked] == [2]
    assert {look.thinning for look in ranks.looks} == {4}
    ranks.looks = [replace(look, thinning_asked=0) for look in ranks.looks]
    for _ in range(60):
        ranks.second()
    assert [command.level for command in ranks.asked] == [2, 0]


def test_a_run_that_stands_still_is_asked_for_a_step_to_come() -> None:
    ranks = Ranks(2, 2, pace=0)
    ranks.second()
    assert ranks.asked[0].at_step == ranks.step + LEAST_AHEAD_STEPS


def test_ranks_on_other_nodes_are_the_servers_to_ask() -> None:
    ranks = Ranks(2, 4)
    ranks.looks = [replace(look, world_size=4) for look in ranks.looks]
    for _ in range(20):
        ranks.second()
    assert not ranks.asked
