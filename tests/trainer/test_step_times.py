"""The trainer's own clock: each step has a line, and a checkpoint comes after what was trained."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.step_times import StepTimes
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World

SMALL = "--layers 1 --width 16 --heads 2 --context 16 --data-bytes 20000 --device cpu".split()


def test_the_steps_of_a_run(world: World, tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    flags = ["--steps", "6", "--checkpoint-every", "3", "--checkpoint-dir", str(tmp_path / "saved")]
    trainer = Trainer(load_settings([*SMALL, *flags, "--step-times", str(path)], {}), world)
    began_ns = time.time_ns()
    trainer.run()
    ended_ns = time.time_ns()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["rank"], line["restarts"], line["step"]) for line in lines] == [
        (0, 0, step) for step in range(1, 7)
    ]
    edges = [line[name] for line in lines for name in ("began_ns", "trained_ns", "ended_ns")]
    assert all(a <= b for a, b in itertools.pairwise([began_ns, *edges, ended_ns]))
    after = {line["step"]: line["ended_ns"] - line["trained_ns"] for line in lines}
    assert min(after[3], after[6]) > max(after[1], after[2], after[4], after[5])


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    times = StepTimes("", rank=0, restarts=0)
    times.begin()
    times.trained()
    times.end(1)
    times.close()
    assert not list(tmp_path.iterdir())


def test_a_wait_is_kept_where_it_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    times = StepTimes(str(path), rank=1, restarts=0)
    for step, waited_seconds in ((1, None), (2, 0.25)):
        times.begin()
        times.trained()
        times.end(step, waited_seconds)
    times.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("waited_seconds") for line in lines] == [None, 0.25]
