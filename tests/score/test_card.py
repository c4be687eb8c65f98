"""The score card: one seed of every diagnosis is right, and its tables count what happened."""

from __future__ import annotations

import pytest

from tests.score import flight_baseline
from tests.score.baselines import NAMES, baselines
from tests.score.card import baseline_rows, rows
from tests.score.cases import DIAGNOSES, case_of
from tests.score.outcome import Outcome, run


@pytest.mark.parametrize("name", [diagnosis.name for diagnosis in DIAGNOSES])
def test_every_planted_fault_is_named_and_nobody_else(name: str) -> None:
    diagnosis = next(one for one in DIAGNOSES if one.name == name)
    outcome, _, _ = run(case_of(diagnosis, diagnosis.smallest, seed=2))
    assert outcome.found == outcome.planted, outcome.said
    assert outcome.wrong == 0, outcome.said
    assert outcome.accused == ()
    if outcome.cost is not None and outcome.cost_truth is not None:
        assert outcome.cost == pytest.approx(outcome.cost_truth, abs=0.05)


def test_the_rules_of_others_see_a_very_slow_rank_and_torch_a_hung_one() -> None:
    slow, hang = (next(one for one in DIAGNOSES if one.name == name)
                  for name in ("slow rank, then a hang", "hang"))  # fmt: skip
    case = case_of(slow, 8, seed=0)
    _, state, _ = run(case)
    assert baselines(state, case.job)[NAMES[0]] == (case.job.faults[0].rank,)
    case = case_of(hang, 8, seed=0)
    _, _, recording = run(case)
    assert case.job.faults[0].rank in flight_baseline.fr_trace(recording)


def test_a_row_counts_what_is_right_wrong_and_missing() -> None:
    one = Outcome("hang", 8, 0, planted=1, found=1, right=1, rank_hours=1.0, named_after_s=4.0)
    two = Outcome("hang", 8, 1, planted=1, wrong=1, rank_hours=1.0, accused=(3,))
    three = Outcome("hang", 64, 0, planted=1, was_silent=True, rank_hours=2.0)
    row = rows([one, two, three], "simulation")[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["hang", "simulation", "8, 64", "3", "3"]
    assert cells[5:10] == ["50.0 % (1/2)", "33.3 % (1/3)", "250.0", "1", "33.3 % (1/3)"]
    assert cells[10] == "4.0 (4.0)"


def test_the_rules_of_others_are_counted_by_ranks() -> None:
    exact = Outcome("hang", 8, 0, planted=1, found=1, num_guilty=1, baselines={"z": (1, 0)})
    wide = Outcome("hang", 8, 1, planted=1, found=1, num_guilty=1, baselines={"z": (8, 7)})
    other = Outcome("hang", 8, 2, planted=1, was_silent=True, num_guilty=1,
                    baselines={"z": (1, 1)})  # fmt: skip
    ours, others = baseline_rows([exact, wide, other])[2:]
    assert ours == "| hang | ours | 3 | 66.7 % (2/3) | 1 | 0 | 0 |"
    assert others == "| hang | z | 3 | 33.3 % (1/3) | 0 | 2 | 8 |"
