"""What preflight prints as a repair, run as it stands: then the fault is gone."""

from __future__ import annotations

import shlex

import pytest

from rankscope.preflight.model import CheckFinding
from tests.preflight.faults import BY_NAME, HEALTHY
from tests.preflight.nslab import Lab
from tests.preflight.scene import Scene, base_environment
from tests.preflight.trial import Way, ask_all, misses

pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip
# A machine too busy to time a path has no answer there, and exit 3: what is timed has other tests.
WAY = Way(options="--quick", has_torch=False, skip=("net.latency",))
# What a firewall of the laboratory needs is in another test; here: routes, interfaces, places.
MENDED = (
    "route-blackhole", "route-gateway", "gloo-other-network", "nic-down", "loopback-down",
    "rp-filter", "cache-read-only",
)  # fmt: skip


def execute(scene: Scene, finding: CheckFinding) -> None:
    """Run the repairs of a finding on their hosts: `sudo` is nobody here, `export` stays."""
    scene.lab.own_etc()
    for fix in finding.fix:
        numbers = [scene.lab.names.index(fix.node)] if fix.node else list(scene.everywhere)
        for number in numbers:
            assert not fix.command.startswith("# "), fix.command
            assert "\n" not in fix.command
            words = shlex.split(fix.command)
            if words[0] == "export":
                settings = (word.partition("=") for word in words[1:])
                scene.lab.env[number].update({name: value for name, _, value in settings})
            else:
                scene.lab.run(number, f'sudo() {{ "$@"; }}; {fix.command}')


@pytest.mark.parametrize("name", MENDED)
def test_a_repair_mends(name: str) -> None:
    fault = BY_NAME[name]
    with Lab(base=base_environment()) as lab:
        scene = Scene(lab)
        fault.build(scene)
        before = ask_all(scene, fault, WAY)
        assert not misses(before), misses(before)
        wanted = {expected.id for expected in fault.expected}
        (finding,) = [one for one in before.answers[0].loud if one.id in wanted]
        execute(scene, finding)
        after = ask_all(scene, HEALTHY, WAY)
    left = [one for answer in after.answers for one in answer.loud if one.id not in fault.also]
    assert left == []
    assert {answer.exit_code for answer in after.answers} == {0}
