"""Who is in a group, and whether a step is trained: decided once, however the members come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from rankscope_trainer.regroup.places import Epoch, LeftOutError, Places

T = TypeVar("T")
LONG, SHORT = 60.0, 0.3
JOIN_SECONDS = 50.0


class Job:
    """Places in one store, each used by a thread of its own."""

    def __init__(self, num_places: int, patience_seconds: float = LONG) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.num_places, self.patience_seconds = num_places, patience_seconds

    def places(self, process: str) -> Places:
        return Places(
            self.store, process, num_places=self.num_places,
            patience_seconds=self.patience_seconds,
        )  # fmt: skip

    def taken(self) -> list[Places]:
        """Return one process for each place, which is named after it."""
        found = []
        for rank in range(self.num_places):
            found.append(self.places(f"p{rank}"))
            found[-1].take(rank)
        return found

    def gone(self, process: str) -> None:
        Places.say_gone(self.store, process)


class Later:
    """What a call in a thread returns."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            self._result = error

    def result(self) -> Any:
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), "it still waits"
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def together(calls: list[Callable[[], T]]) -> list[T]:
    later = [Later(call) for call in calls]
    return [one.result() for one in later]


def form(places: list[Places], steps: list[int] | None = None) -> list[Epoch | None]:
    ranks = [int(one.process[1:]) for one in places]
    at = steps or [0] * len(places)
    return together(
        [lambda one=one, rank=rank, step=step: one.form(rank, step)  # type: ignore[misc]
         for one, rank, step in zip(places, ranks, at, strict=True)]
    )  # fmt: skip


def until_asked(alone: Places, step: int) -> int:
    """Train from a step on until another process asks to be let in; return the last one."""
    return next(at for at in itertools.count(step) if alone.vote(at) == "train, then regroup")


def test_the_first_group_waits_for_all_places() -> None:
    epochs = form(Job(3).taken())
    assert epochs[0] is not None
    assert (epochs[0].number, epochs[0].ranks, epochs[0].is_untrained) == (1, [0, 1, 2], True)
    assert epochs.count(epochs[0]) == 3


def test_without_a_rank_that_is_gone_nothing_is_waited_for() -> None:
    job = Job(3)
    places = job.taken()
    form(places)
    job.gone("p1")
    first, last = form([places[0], places[2]], [7, 7])
    assert first == last
    assert first is not None
    assert (first.number, first.ranks, first.lost, first.is_untrained) == (
        2,
        [0, 2],
        {1: "p1"},
        False,
    )


def test_one_that_stops_is_left_out_after_a_while_and_let_in_when_it_comes() -> None:
    job = Job(2, SHORT)
    one, other = job.taken()
    form([one, other])
    alone = one.form(0, 5)
    assert alone is not None
    assert alone.ranks == [0]
    late = Later(lambda: other.form(1, 4))  # asks to be let in
    again = one.form(0, until_asked(one, 6))
    assert again == late.result()
    assert again is not None
    assert again.ranks == [0, 1]
    assert (again.source, again.is_level) == (0, False)


def test_a_step_is_trained_by_all_or_by_none() -> None:
    job = Job(3)
    places = job.taken()
    form(places)
    assert together([lambda one=one: one.vote(1) for one in places]) == ["train"] * 3  # type: ignore[misc]
    waiting = [Later(lambda one=one: one.vote(2)) for one in places[:2]]  # type: ignore[misc]
    assert places[2].abort(2)
    assert [one.result() for one in waiting] == ["abort"] * 2
    assert places[0].is_broken(1)


def test_who_failed_after_all_had_agreed_cannot_take_it_back() -> None:
    places = Job(1).taken()
    form(places)
    assert places[0].vote(1) == "train"
    assert not places[0].abort(1)


def test_a_vote_without_the_others_ends_by_itself() -> None:
    places = Job(2, SHORT).taken()
    form(places)
    assert places[0].vote(1) == "abort"
    assert places[1].vote(1) == "abort"  # it comes too late, and reads the same


def test_a_process_that_stands_by_takes_the_place_of_one_that_was_lost() -> None:
    job = Job(2)
    places, standby = job.taken(), job.places("standby")
    form(places)
    assert standby.take_vacant() is None
    job.gone("p1")
    alone = places[0].form(0, 3)
    assert alone is not None
    assert standby.take_vacant() == 1
    assert job.places("another").take_vacant() is None
    come = Later(lambda: standby.form(1, 0))
    until_asked(places[0], 4)
    both = places[0].form(0, 4)
    assert both == come.result()
    assert both is not None
    assert (both.ranks, both.lost, both.ids) == ([0, 1], {}, {"p0", "standby"})


def test_whose_place_is_taken_leaves() -> None:
    job = Job(2, SHORT)
    places = job.taken()
    form(places)
    places[0].form(0, 3)
    assert job.places("standby").take_vacant() == 1
    with pytest.raises(LeftOutError, match="taken the place of rank 1"):
        places[1].form(1, 2)
    with pytest.raises(LeftOutError, match="another process has the place of rank 0"):
        job.places("stranger").take(0)


def test_one_that_is_to_be_left_out_is() -> None:
    job = Job(3)
    places = job.taken()
    form(places)
    places[0].leave_out(2)
    assert (
        together([lambda one=one: one.vote(1) for one in places])
        == [  # type: ignore[misc]
            "train, then regroup"
        ]
        * 3
    )
    with pytest.raises(LeftOutError, match="rank 2 is left out"):
        places[2].form(2, 1)
    first, _ = form(places[:2], [1, 1])
    assert first is not None
    assert first.ranks == [0, 1]


def test_who_waits_for_a_place_ends_with_the_training() -> None:
    job = Job(1)
    places = job.taken()
    form(places)
    places[0].say_over()
    standby = job.places("standby")
    assert standby.is_over
    assert standby.take_vacant() is None


def test_where_all_are_gone_one_that_comes_begins_afresh() -> None:
    job = Job(1)
    places, standby = job.taken(), job.places("standby")
    form(places)
    job.gone("p0")
    form_again = job.places("p1")
    job.store.set("owner/1", "p1")
    epoch = form_again.form(1, 0)
    assert epoch is not None
    assert (epoch.ranks, epoch.is_untrained) == ([1], True)
    assert standby.take_vacant() == 0


def test_an_epoch_reads_as_it_was_written() -> None:
    (epoch,) = form(Job(1).taken())
    assert epoch is not None
    assert Epoch.decode(epoch.encode().encode()) == epoch
