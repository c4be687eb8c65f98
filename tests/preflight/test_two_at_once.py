"""Two preflights on the same nodes: the second waits for its turn, and no one is in its way."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.preflight.nslab import Lab
from tests.preflight.scene import MASTER_PORT, Scene, base_environment
from tests.preflight.trial import ROOT

LIMIT_S = 120.0

pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip


@pytest.mark.parametrize("names", [("", ""), ("first", "second")])
def test_the_second_waits_for_the_first_and_both_pass(names: tuple[str, str]) -> None:
    with Lab(2, base=base_environment()) as lab:
        scene = Scene(lab)
        first = begin(scene, names[0])
        listens = f"ss -ltn | grep -q :{MASTER_PORT}"
        for number in scene.everywhere:
            while lab.run(number, listens, check=False).returncode:
                assert first[number].poll() is None, first[number].communicate()[0]
                time.sleep(0.05)
        second = begin(scene, names[1])
        screens = [agent.communicate(timeout=LIMIT_S)[0] for agent in (*first, *second)]
    assert [agent.returncode for agent in (*first, *second)] == [0] * 4, screens
    turn = "MASTER_PORT of this node is in use: waiting for the end of"
    assert [turn in screen for screen in screens] == [False, False, True, True], screens
    other = f"the preflight {names[0]}" if names[0] else "an earlier preflight"
    assert f"{turn} {other}" in screens[2]


def begin(scene: Scene, name: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rankscope", "preflight", "--nodes", "node0,node1"]
    command += ["--skip", "collective", *(["--run", name] if name else [])]
    return [
        scene.run_preflight(
            number, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            env={**scene.lab.environment(number), "PYTHONPATH": str(ROOT / "agent")},
        )
        for number in scene.everywhere
    ]  # fmt: skip
