from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies.stages.placement import num_stages, rank_of_stage
from rankscope_trainer.strategies.stages.split import split_by_time


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_any_split_can_make_it(num_stages: int) -> None:
    draw = random.Random(num_stages)
    for _ in range(20):
        seconds = [draw.uniform(0.5, 4) for _ in range(7)]
        first, last = draw.uniform(0, 3), draw.uniform(0, 3)
        sizes = split_by_time(seconds, num_stages, first_seconds=first, last_seconds=last)
        assert sum(sizes) == len(seconds)
        assert min(sizes) >= 1
        assert len(sizes) == num_stages
        slowest = min(
            _slowest(seconds, [*cuts, 7], first, last)
            for cuts in itertools.combinations(range(1, 7), num_stages - 1)
        )
        ends = list(itertools.accumulate(sizes))
        assert _slowest(seconds, ends, first, last) == pytest.approx(slowest)


def _slowest(seconds: list[float], ends: list[int], first: float, last: float) -> float:
    stages = [sum(seconds[a:b]) for a, b in itertools.pairwise([0, *ends])]
    stages[0] += first
    stages[-1] += last
    return max(stages)


def test_equal_layers_make_equal_stages_unless_the_head_is_heavy() -> None:
    assert split_by_time([1.0] * 8, 4) == [2, 2, 2, 2]
    assert split_by_time([1.0] * 4, 2, last_seconds=2.0) == [3, 1]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("gpipe", [0, 1]), ("interleaved", [0, 1, 0, 1]), ("zero_bubble_v", [0, 1, 1, 0])],
)
def test_stages_are_on_a_loop_or_on_a_v(schedule: str, ranks: list[int]) -> None:
    settings = load_settings(["--strategy", "pipeline", "--schedule", schedule], {}, 2)
    stages = range(num_stages(settings, 2))
    assert [rank_of_stage(settings, stage, 2) for stage in stages] == ranks


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        ("--stage-layers 2,2,2", "stage_layers", "Give 4 whole numbers from 1"),
        ("--stage-layers 8,0,0,0", "stage_layers", "which add up to 8"),
        ("--stage-layers 2,2,2,two", "stage_layers", "no list of numbers"),
        ("--schedule interleaved --layers 7", "layers", "at least 8 layers"),
        ("--schedule zero_bubble --microbatches 9", "microbatches", "multiple of 4"),
        ("--schedule zero_bubble_v --virtual-stages 1", "virtual_stages", "Give 2"),
        ("--schedule zero_bubble_v --validate-every 5", "validate_every", "another schedule"),
        ("--strategy model_parallel --microbatches 2", "microbatches", "choose pipeline"),
        ("--strategy model_parallel --layers 3", "layers", "at least 4 layers"),
        ("--layer-seconds 0.1,0.2", "layer_seconds", "or 8 separated by commas"),
        ("--layer-seconds -1", "layer_seconds", "one number of seconds"),
    ],
)
def test_what_cannot_be_is_refused(arguments: str, name: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        load_settings(["--strategy", "pipeline", *arguments.split()], {}, world_size=4)
    assert raised.value.name == name
    assert words in str(raised.value)


def test_a_split_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('strategy = "pipeline"\nstage_layers = "1,3,2,2"\n')
    arguments = ["--config", str(tmp_path / "config.toml")]
    assert load_settings(arguments, {}, world_size=4).stage_layers == "1,3,2,2"
