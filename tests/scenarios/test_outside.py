"""A hang in a thinned step whose kernels are out of the dispatcher, with a real server."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests import fork_server
from tests.agent import recorded
from tests.scenarios.conftest import Watched

pytestmark = pytest.mark.multiproc

SCRIPT = Path(recorded.SCRIPTS) / "outside.py"


def test_the_rank_that_does_not_arrive_is_named(watched: Watched, tmp_path: Path) -> None:
    environment = recorded.environment(
        tmp_path, RANKSCOPE_RUN_ID="scenario", RANKSCOPE_SERVER=watched.url,
        RANKSCOPE_COLLECTOR="1", RANKSCOPE_COLLECTIVES="kernels", RANKSCOPE_OVERHEAD_PERCENT="90",
    )  # fmt: skip
    goes_on = tmp_path / "goes on"
    command = [*fork_server.launcher(3), str(SCRIPT), "hang", str(goes_on)]
    with watched.log.open("ab") as log:
        watched.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    watched.until(lambda: '"is_in": false' in watched.log.read_text(), 60)
    began = time.monotonic()
    hang = watched.until(
        lambda: next((one for one in watched.get("/findings").get("open", [])
                      if one["kind"] == "hang"), None), 25,
    )  # fmt: skip
    assert hang["ranks"] == [2]
    assert hang["victims"] == [0, 1]
    assert time.monotonic() - began < 20
    assert "all_reduce #" in hang["what"]
    goes_on.touch()
    assert watched.process.wait(60) == 0, watched.log.read_text()
    assert hang["id"] in [one["id"] for one in watched.get("/findings")["recovered"]]
    assert "rankscope:" not in watched.log.read_text()
