"""An agent that is broken in every function changes nothing that the script computes or sees."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.agent import recorded

pytestmark = pytest.mark.multiproc
BROKEN = Path(__file__).parent / "broken"
WORLD = 2


def train(directory: Path, context: str, **variables: str) -> tuple[list[Any], list[str], set[str]]:
    """Return what each rank wrote, what it printed at its end, and which functions failed."""
    directory.mkdir()
    command = [
        *fork_server.torchrun(), "--standalone", "--nproc-per-node", str(WORLD),
        "--redirects", "2", "--log-dir", str(directory / "logs"),
        str(recorded.SCRIPTS / "ordinary.py"), str(directory / "result"), context,
    ]  # fmt: skip
    environment = recorded.environment(
        directory, BROKEN_NAMES=str(directory / "names"), **variables
    )
    if "BROKEN" not in variables:  # it has to come before the agent's modules are imported
        environment |= fork_server.under_torchrun()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stderr[-3000:]
    # a file for each rank: in one stream their lines may run into each other
    errors = [path.read_text() for path in sorted((directory / "logs").glob("*/*/*/stderr.log"))]
    assert len(errors) == WORLD, done.stderr[-3000:]
    results = [json.loads((directory / f"result.{rank}.json").read_text()) for rank in range(WORLD)]
    found = re.findall(r"(?m)^(?:\[rank\d\]: )?(\w*(?:Error|Exception): .*)$", "\n".join(errors))
    ends = sorted(set(found))
    own = [end for end in ends if "BrokenOnPurpose" in end]
    assert not own, errors
    names = {name for path in directory.glob("names.*") for name in path.read_text().split()}
    return results, ends, names


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_nothing_changes_for_the_script(tmp_path: Path, context: str) -> None:
    plain = train(tmp_path / "off", context, RANKSCOPE="0")
    results, ends, _ = plain
    assert len(results[0]["losses"]) == 8
    assert [kind for _, kind, _ in results[0]["seen"]] == EXPECTED
    assert {"ValueError: the end of rank 0", "KeyError: 'thread'"} <= set(ends)
    assert train(tmp_path / "on", context)[:2] == plain[:2]
    if context == "spawn":
        return
    for how, more, parts in (
        ("before", {"RANKSCOPE_COLLECTIVES": "kernels"}, (*PARTS, "kernels._issuer")),
        ("after", {}, (*PARTS, "world_known")),
    ):
        broken = train(
            tmp_path / how, context, PYTHONPATH=str(BROKEN), BROKEN=how, RANKSCOPE="0", **more
        )
        assert broken[:2] == plain[:2], how
        missing = {part for part in parts if not any(part in name for name in broken[2])}
        assert not missing, f"{how}: these never failed: {missing}; of {sorted(broken[2])}"


# what the script itself must see of its mistakes
EXPECTED = [
    "IndexError", "ValueError", "RuntimeError", "RuntimeError", "ZeroDivisionError", "UserWarning",
    "TypeError", "nothing", "TypeError", "nothing",
]  # fmt: skip
# places that must really have failed, each a part of a function's full name
PARTS = (
    "exceptions._keep", "LogCapture.take", "Warnings", "Writes.take", "Stacks._open", "memory",
    "numbers", "pauses", "backward", "checkpoint", "data", "optimizer", "_finish",
)  # fmt: skip
