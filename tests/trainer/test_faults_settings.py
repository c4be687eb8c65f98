"""Faults that build the run in another way than its settings say: what it then really does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_trainer.errors import EXIT_USAGE
from tests.trainer.launch import RECORDED_TRAINER, run

pytestmark = pytest.mark.multiproc


def test_a_pipeline_has_fewer_and_larger_microbatches(tmp_path: Path) -> None:
    arguments = ["--strategy", "pipeline", "--schedule", "gpipe", "--steps", "3"]
    arguments += ["--microbatches", "8", "--batch-size", "1"]
    finished = run(tmp_path, 2, *arguments, "--fault", "few_microbatches:size=2")
    assert finished.code == 0, finished.output
    begins = [line for line in finished.manifest() if "size" in line]
    names = [(line["fault"], line["start_step"], line["size"]) for line in begins]
    assert names == [("few_microbatches", 0, "2")] * 2
    activation_bytes = 4 * 32 * 32 * 4  # half of the batch
    for step in (2, 3):
        sent = [size for name, size in finished.operations(0)[step] if name == "send"]
        assert sent == [activation_bytes] * 2


def test_a_fault_that_the_run_cannot_show_is_refused(tmp_path: Path) -> None:
    finished = run(tmp_path, 0, "--steps", "3", "--fault", "few_microbatches:size=2")
    assert finished.code == EXIT_USAGE
    assert "few_microbatches has no effect on strategy ddp" in finished.output
    assert finished.manifest() == []


def test_the_workers_of_one_rank_leak(tmp_path: Path) -> None:
    fault = "worker_leak:rank=1,start=3,steps=8,size=5MiB"
    finished = run(
        tmp_path, 2, "--steps", "20", "--loader-workers", "2", "--fault", fault,
        program=RECORDED_TRAINER,
    )  # fmt: skip
    assert finished.code == 0, finished.output
    begin, end = finished.manifest()
    assert (begin["rank"], begin["start_step"], end["end_step"]) == (1, 3, 10)
    assert end["leaked_mib"] == 40
    grown = [
        [after["rss_mib"] - before["rss_mib"] for before, after in pairs]
        for pairs in (
            zip(*(finished.record(rank)[step]["children"] for step in (3, 20)), strict=True)
            for rank in (0, 1)
        )
    ]
    assert [len(workers) for workers in grown] == [2, 2]
    assert max(grown[0]) < 20 < 35 < min(grown[1])


def test_a_fault_of_loading_needs_the_rank_to_load(tmp_path: Path) -> None:
    faults = ["--fault", "slow_data:rank=0,start=1,size=1ms"]
    finished = run(tmp_path, 0, "--steps", "3", "--loader-workers", "1", *faults)
    assert finished.code == EXIT_USAGE
    assert "slow_data acts where the rank loads its data, and it does not" in finished.output
