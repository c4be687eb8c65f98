"""Values of steps that pages draw."""

from __future__ import annotations

import numpy as np

from rankscope.wire.schema import STEP_COLUMNS, STEP_THINNED, STEP_WAITS_UNKNOWN
from rankscope_server.ingest.step_metrics import metrics_of_steps


def test_work_is_unknown_where_the_waits_were_not_seen() -> None:
    columns = {name: np.zeros(2, np.int64) for name in STEP_COLUMNS}
    columns["duration_ns"] = columns["backward_ns"] = np.array([10_000_000, 10_000_000])
    columns["backward_blocked_ns"] = np.array([4_000_000, 1_000_000])
    columns["flags"] = np.array([STEP_THINNED, STEP_THINNED | STEP_WAITS_UNKNOWN])
    values = metrics_of_steps(dict(columns))
    assert values["step"].tolist() == [10.0, 10.0]
    assert values["backward"].tolist() == [10.0, 10.0]
    assert values["own_work"][0] == 6.0
    assert values["blocked"][0] == 4.0
    assert np.isnan([values["own_work"][1], values["blocked"][1]]).all()
