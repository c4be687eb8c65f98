"""Runs a command to its end as a user would, attached, and reads its run page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.agent import recorded
from tests.scenarios.conftest import Watched
from tests.server.conftest import ServerProcess

PYTHON = sys.executable
TROUBLE = re.compile(  # what is said of the run is none
    r"^rankscope: (?!verdict: |why: |next: )"
    r".*(failed|not attached|not watched|lost|records nothing).*",
    re.M,
)
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = (PYTHON, "-m", "rankscope", "run", "--")


def environment(directory: Path, server: ServerProcess, **more: str) -> dict[str, str]:
    """Return an environment in which nothing is attached yet and torch takes one core a rank."""
    variables = recorded.environment(
        directory, RANKSCOPE_SERVER=server.url, PYTHONDONTWRITEBYTECODE="1", **more
    )
    for name in ("RANKSCOPE", "RANKSCOPE_COLLECTOR", "PYTHONPATH"):
        if name not in more:
            variables.pop(name)
    return variables


def launch(
    server: ServerProcess,
    directory: Path,
    *command: str,
    attach: tuple[str, ...] = RUN,
    code: int = 0,
    seconds: float = 200.0,
    **variables: str,
) -> Watched:
    """Run a command and return its run page; fail if it, or the agent, had trouble.

    The run has the name of its directory: a server may have runs of several tests.
    """
    variables = {"RANKSCOPE_RUN_ID": directory.name} | variables
    run = Watched(server, directory, variables["RANKSCOPE_RUN_ID"])
    with run.log.open("ab") as log:
        done = subprocess.run(
            [*attach, *command], env=environment(directory, server, **variables), stdout=log,
            stderr=log, timeout=seconds, check=False, cwd=directory,
        )  # fmt: skip
    output = run.log.read_text(errors="replace")
    assert done.returncode == code, output[-4000:]
    assert not TROUBLE.search(output), TROUBLE.findall(output)
    ended = "ended" if code == 0 else "failed"
    run.until(lambda: run.get().get("run", {}).get("status") == ended, 30)
    return run


def cells(run: Watched, rank: int) -> list[dict[str, Any]]:
    """Return the steps of a rank that ended, from 1 on."""
    found: list[dict[str, Any]] = []
    while (cell := run.get(f"/cell?rank={rank}&step={len(found) + 1}")).get("step_ms") is not None:
        found.append(cell)
    return found


def operations(run: Watched, rank: int) -> Counter[str]:
    """Return how many collectives of each kind a rank recorded; all of them must have ended."""
    rows = run.get(f"/collectives/records?rank={rank}&limit=500")["rows"]
    assert {row["state"] for row in rows} <= {"ended"}
    return Counter(row["operation"] for row in rows)


def phases_add_up(step: dict[str, Any]) -> bool:
    """Return whether self time in all phases and waiting for peers are the whole step."""
    return abs(sum(step["phases"].values()) + step["blocked_ms"] - step["step_ms"]) < 0.01
