"""Faults that build the run in another way than its settings say: what it then really does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_trainer.errors import EXIT_USAGE
from tests.trainer.launch import run

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
    finished = run(tmp_path, 1, "--steps", "3", "--fault", "few_microbatches:size=2")
    assert f"exitcode  : {EXIT_USAGE}" in finished.output
    assert "few_microbatches has no effect on strategy ddp" in finished.output
    assert finished.manifest() == []
