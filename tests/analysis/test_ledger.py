"""Parts of the ledger that only real jobs have: launchers, set-up in first steps, waits for saves,
and where a run went on after a restart.
"""  # fmt: skip

from __future__ import annotations

from collections.abc import Container

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.goodput.detector import ledger_of
from rankscope_server.diagnose.goodput.ledger import Ledger
from rankscope_server.observe.resume import ScriptSteps, Start, first_done_again, last_whole_save
from tests.analysis.records import registered
from tests.analysis.simulator import START_NS

SECOND = 10**9


def said(step: int, counted: int, at: int, rank: int = 0) -> schema.Metrics:
    return schema.Metrics(
        attempt=0, rank=rank, time_ns=at, step=step, values={"loss": 1.0}, counted_step=counted
    )


def test_how_far_the_scripts_numbers_are_ahead() -> None:
    told = ScriptSteps()
    assert told.ahead is None
    for step in (121, 122, 122):  # the last one twice
        told.take(said(step, step - 119, step))
    assert told.ahead is None  # two are not enough
    told.take(said(7, 0, 200))  # the agent's own
    told.take(said(123, 4, 123))
    assert told.ahead == 119


def test_epochs_given_as_steps_tell_nothing() -> None:
    told = ScriptSteps()
    for epoch in range(1, 20):
        told.take(said(epoch, 100 * epoch, epoch))
    assert told.ahead is None


def test_the_newest_numbers_count_in_any_order() -> None:
    early = [said(step, step + 1, step) for step in range(1, 20)]
    late = [said(step, step - 99, step) for step in range(100, 110)]
    for records in (early + late, late + early, [*late[::-1], *early, *late]):
        told = ScriptSteps()
        for record in records:
            told.take(record)
        assert told.ahead == 99


def test_a_checkpoint_that_not_all_ranks_wrote_is_not_whole() -> None:
    saves = [(rank, step) for step in (21, 41) for rank in range(4)]
    assert last_whole_save(saves) == 40
    assert last_whole_save([*saves, (0, 61), (2, 61)]) == 40
    assert last_whole_save([(0, 21), (0, 41)]) == 40
    assert last_whole_save([]) == 0


@pytest.mark.parametrize(
    ("later", "first"),
    [
        ([], None),
        ([Start(61, 90)], None),  # the script counts, and nothing is done again
        ([Start(41, 90)], 41),
        ([Start(1, 30)], 51),  # behind the checkpoint of step 50
        ([Start(1, 30, ahead=39)], 41),  # the script says so, whatever was saved
        ([Start(1, 30, ahead=39), Start(1, 30, ahead=29)], 31),  # the second goes back further
        ([Start(1, 30, ahead=-1)], 1),  # all of it
    ],
)
def test_where_a_run_went_on(later: list[Start], first: int | None) -> None:
    assert first_done_again(Start(1, 60, ahead=-1, saved_step=50), later) == first


def test_without_any_checkpoint_all_is_done_again() -> None:
    assert first_done_again(Start(1, 60), [Start(1, 90)]) == 1


@pytest.mark.parametrize(
    ("later", "first"),
    [
        ([Start(41, 60), Start(1, 70)], 1),  # the second one began anew: nothing was saved
        ([Start(41, 60, saved_step=50), Start(1, 70)], 41),  # from the save of the first one
        ([Start(41, 60), Start(61, 70), Start(1, 20)], 1),
    ],
)
def test_a_start_without_a_save_between_leads_further_back(later: list[Start], first: int) -> None:
    assert first_done_again(Start(1, 60), later) == first


class Run:
    """Two ranks with whole seconds for everything."""

    def __init__(self) -> None:
        self.state = RunState("run")
        for at in (10, 14):  # a rank tells of itself again when it knows more
            for rank in range(2):
                self.state.apply_record(registered(rank, 2, time_ns=self.ns(at), host="a"))

    @staticmethod
    def ns(seconds: float) -> int:
        return START_NS + int(seconds * SECOND)

    def steps(self, rank: int, *, unseen: Container[int] = (), **seconds: list[float]) -> None:
        """Give the steps of a rank from second 10 on, by phase; `forward` is all of it."""
        duration = np.array(seconds.pop("duration"))
        columns = {name: np.zeros(len(duration), np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, len(duration) + 1)
        columns["duration_ns"] = (duration * SECOND).astype(np.int64)
        columns["started_ns"] = self.ns(10) + np.cumsum(columns["duration_ns"])
        columns["started_ns"] -= columns["duration_ns"]
        for name, values in seconds.items():
            columns[f"{name}_ns"] = (np.array(values) * SECOND).astype(np.int64)
        columns["flags"][0] = schema.STEP_FIRST
        columns["flags"][columns["checkpoint_ns"] > 0] |= schema.STEP_CHECKPOINT
        columns["num_collectives"][:] = 1
        is_unseen = np.array([step in unseen for step in columns["step"].tolist()])
        columns["flags"][is_unseen] |= schema.STEP_THINNED | schema.STEP_WAITS_UNKNOWN
        chunk = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="", count=len(duration),
            time_lo_ns=self.ns(10), time_hi_ns=self.ns(10 + duration.sum()), data=b"%d" % rank,
        )  # fmt: skip
        self.state.apply_chunk(chunk, columns)

    def end(self, at: float) -> None:
        for rank in range(2):
            self.state.apply_record(schema.RankEnded(
                attempt=0, rank=rank, time_ns=self.ns(at), reason="clean", exit_code=0
            ))  # fmt: skip

    def launcher(self, began: float, ended: float) -> None:
        node = {"attempt": 0, "rank": schema.NODE_RANK}
        self.state.apply_record(schema.RunStarted(**node, time_ns=self.ns(began), name="job"))
        self.state.apply_record(
            schema.Event(**node, time_ns=self.ns(ended), name=schema.COMMAND_ENDED)
        )

    def book(self) -> Ledger:
        book = ledger_of(self.state._attempts[0].window(self.ns(100)))
        assert book is not None
        assert sum(book.parts.values()) == pytest.approx(book.wall_seconds)
        return book


def test_the_time_of_the_launcher_counts() -> None:
    run = Run()
    for rank in range(2):
        run.steps(rank, duration=[1.0] * 10)
    run.end(22)
    book = run.book()
    assert book.wall_seconds == 2 * 12
    assert book.parts["start-up"] == 0
    run.launcher(4, 25)
    book = run.book()
    assert book.wall_seconds == 2 * 21
    assert book.parts["start-up"] == 2 * 6
    assert book.parts["after the end"] == 2 * 5
    assert book.parts["productive"] == 2 * 10


def test_setting_up_in_the_first_step_is_no_training() -> None:
    run = Run()
    for rank in range(2):
        run.steps(rank, duration=[8.0] + [1.0] * 9, other=[4.0] + [0.0] * 9,
                  forward_blocked=[1.0 * rank] + [0.0] * 9)  # fmt: skip
    run.end(27)
    book = run.book()
    assert book.parts["start-up"] == 2 * 4 + 1
    assert book.parts["first steps"] == 2 * 3 - 1
    assert book.parts["productive"] == 2 * 10
    assert book.ettr == pytest.approx(10 / 17)


def test_who_waits_for_the_rank_that_saves_is_saving_too() -> None:
    run = Run()
    duration = [1.0, 1.0, 1.0, 4.0] * 5
    saves = [0.0, 0.0, 0.0, 2.0] * 5  # a second more goes into copies beside the call
    run.steps(0, duration=duration, checkpoint=saves)
    run.steps(1, duration=duration, backward_blocked=[0.0, 0.0, 0.0, 3.0] * 5)
    run.end(10 + sum(duration))
    book = run.book()
    assert book.parts["checkpoint"] == pytest.approx(2 * 15)
    assert book.parts["communication and waiting"] == pytest.approx(0)
    assert book.parts["productive"] == pytest.approx(2 * 20)


def test_waits_that_thinned_steps_did_not_see_are_taken_for_as_long_as_the_others() -> None:
    run = Run()
    unseen = [step for step in range(1, 41) if step % 4]
    waits = [0.0 if step in unseen else 0.5 for step in range(1, 41)]
    for rank in range(2):
        run.steps(rank, unseen=unseen, duration=[1.0] * 40, backward_blocked=waits)
    run.end(50)
    book = run.book()
    assert book.parts["communication and waiting"] == pytest.approx(2 * 20, rel=0.02)
    assert book.parts["productive"] == pytest.approx(2 * 20, rel=0.02)
