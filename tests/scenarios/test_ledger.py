"""The ledger of a real job that is killed and restarted, against the job's own account."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.accounts import MAX_ETTR_ERROR, MAX_SUM_ERROR, killed_job

pytestmark = [pytest.mark.multiproc, pytest.mark.quiet]


def test_the_ledger_of_a_job_that_is_killed(tmp_path: Path) -> None:
    """More kills and the parts: `python benchmarks/ledger.py`."""
    found = killed_job(tmp_path, kills=1, steps_between=50)
    assert found.attempts == 2
    assert found.book.lost_steps == found.truth.lost_steps
    assert found.sum_error == pytest.approx(0, abs=MAX_SUM_ERROR), found
    assert found.ettr_error == pytest.approx(0, abs=MAX_ETTR_ERROR), found
