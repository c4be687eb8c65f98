from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rankscope_trainer import report
from rankscope_trainer.report import Report


def test_losses_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "new" / "losses.jsonl"
    reporter = Report(log_every=10, tokens_per_step=1, losses=str(path))
    for step, loss in ((1, 0.1), (2, 1 / 3), (3, None)):
        reporter.step(step, loss, 0.5)
    reporter.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [float.fromhex(line["loss"]) for line in lines] == [0.1, 1 / 3]


def test_each_step_is_reported_to_the_agent(
    reported: list[tuple[int, dict[str, float]]],
) -> None:
    reporter = Report(log_every=10, tokens_per_step=64, losses="")
    reporter.step(1, 2.5, 0.125, staleness=3.0)
    reporter.step(2, None, 0.125)
    reporter.validation(2, 3.5)
    assert reported == [
        (1, {"tokens": 64.0, "learning_rate": 0.125, "staleness": 3.0, "loss": 2.5}),
        (2, {"tokens": 64.0, "learning_rate": 0.125}),
        (2, {"validation_loss": 3.5}),
    ]


def test_one_rank_reports_how_many_tokens_the_job_takes_a_second(
    reported: list[tuple[int, dict[str, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 9.0])
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(times))
    reporter = Report(log_every=10, tokens_per_step=64, losses="", is_for_job=True)
    reporter.step(1, None, 0.125)
    reporter.step(2, None, 0.125)
    reporter.regrouped(128, "", is_for_job=True)
    reporter.step(3, None, 0.125)
    reporter.step(4, None, 0.125)
    rates = [values.get("job_tokens_per_second") for _, values in reported]
    assert rates == [None, 32.0, None, 64.0]


def test_it_works_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_log_metrics", None)
    reporter = Report(log_every=1, tokens_per_step=64, losses="")
    reporter.step(1, 2.5, 0.125)
    reporter.validation(1, 2.5)


def test_one_line_every_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rankscope_trainer")
    reporter = Report(log_every=3, tokens_per_step=64, losses="")
    for step in range(1, 8):
        reporter.step(step, 1.25, 0.1)
    starts = [record.getMessage().partition(" tokens/s")[0] for record in caplog.records]
    assert starts == ["step 3 loss 1.2500", "step 6 loss 1.2500"]
