"""Preflight on fake hosts: every fault is found and named, a healthy laboratory passes clean."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import Future

import pytest

from tests.capabilities import NOBODY, TUN
from tests.preflight import nslab
from tests.preflight.faults import BY_NAME, FAULTS, HEALTHY, HEALTHY_TAP, Fault
from tests.preflight.nslab import Lab, Wire
from tests.preflight.scene import MASTER_PORT, Scene, base_environment
from tests.preflight.tap_switch import make_tun
from tests.preflight.trial import ROOT, Trial, Way, attempt, describe, misses, reveal

# Thrice the 10 s that three nodes may take: a shared machine of two processors is no stopwatch.
WIDE_LIMIT_S = 30.0
pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip


def told(trial: Trial) -> str:
    """Return what was wrong, and the screens, for the reader of a failed test."""
    screens = [f"--- {answer.node}\n{answer.screen}" for answer in trial.answers]
    return "\n".join([*misses(trial), *screens])


def needed(fault: Fault) -> tuple[str, ...]:
    """Return what a fault wants of the machine, beside hosts."""
    return (*fault.needs, "tun") if fault.wire == "tap" else fault.needs


def trials_of(*, are_timed: bool) -> list[object]:
    return [
        pytest.param(fault.name, marks=pytest.mark.needs(*needed(fault)))
        for fault in FAULTS
        if fault.is_timed == are_timed
    ]


@pytest.mark.parametrize("fault", trials_of(are_timed=False))
def test_a_fault_is_found_and_named(fault: str, trials: dict[str, Future[Trial]]) -> None:
    trial = trials[fault].result()
    assert not misses(trial), told(trial)
    assert trial.elapsed_s < WIDE_LIMIT_S


@pytest.mark.quiet
@pytest.mark.parametrize("fault", trials_of(are_timed=True))
def test_a_fault_that_shows_in_times_is_found_and_named(fault: str) -> None:
    trial = attempt(BY_NAME[fault], Way(has_torch=False))
    assert not misses(trial), told(trial)
    assert trial.elapsed_s < WIDE_LIMIT_S


@pytest.mark.parametrize(
    ("wire", "num_hosts"),
    [
        ("veth", 3),
        pytest.param("tap", 3, marks=pytest.mark.needs("tun")),
        ("veth", 2),
        ("veth", 4),
    ],
)
def test_a_healthy_laboratory_passes_clean(wire: Wire, num_hosts: int) -> None:
    fault = HEALTHY if wire == "veth" else HEALTHY_TAP
    trial = attempt(fault, Way(num_hosts=num_hosts))
    assert not misses(trial), told(trial)


@pytest.mark.parametrize("num_hosts", [8, 16])
def test_many_healthy_nodes_pass_clean(num_hosts: int) -> None:
    way = Way(num_hosts=num_hosts, options="--quick", has_torch=False)
    trial = attempt(HEALTHY, way)
    assert not misses(trial), told(trial)


@pytest.mark.core
@pytest.mark.parametrize(
    "name", ["healthy", "master-drop", "ephemeral-drop", "loopback-everywhere"]
)
def test_an_ordinary_user_gets_the_same_answer(name: str) -> None:
    trial = attempt(BY_NAME[name], Way(is_user=True, has_torch=False))
    assert not misses(trial), told(trial)


@pytest.mark.parametrize("name", ["healthy", "mtu-hole-node"])
def test_without_torch_all_but_the_smoke_test_runs(name: str) -> None:
    trial = attempt(BY_NAME[name], Way(has_torch=False))
    assert not misses(trial), told(trial)
    for answer in trial.answers:
        assert answer.verdict is not None
        collective = [row for row in answer.verdict.results if row.id == "coll.gloo"]
        assert [row.status for row in collective] == ["skipped"]
        assert "torch" in collective[0].reason


@pytest.mark.parametrize("mode", ["c10d", "env"])
def test_the_launch_is_read_in_every_mode(mode: str) -> None:
    trial = attempt(HEALTHY, Way(mode=mode, has_torch=False))  # type: ignore[arg-type]
    assert not misses(trial), told(trial)


@pytest.mark.needs("root", "user-namespaces", "tun")
def test_the_laboratory_works_without_root() -> None:
    with Lab(1, base=base_environment()) as lab:
        reveal(lab)
        # who sees part of /proc covered may mount no other one in a user namespace
        lab.run(0, "umount /proc/sys/kernel/random/boot_id", check=False)
        lab.env[0][TUN] = str(make_tun(lab.folder / "tun"))  # the system's may be for root only
        done = lab.run(0, [*NOBODY, sys.executable, nslab.__file__], check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.core
def test_ctrl_c_tells_what_is_known_and_leaves_nothing_behind() -> None:
    with Lab(base=base_environment()) as lab:
        scene = Scene(lab)
        own = {**lab.environment(0), "PYTHONPATH": str(ROOT / "agent")}
        command = [sys.executable, "-m", "rankscope", "preflight", "--nodes", "node0,node1,node2"]
        child = scene.start(
            0, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=own, errors="replace"
        )
        listens = f"ss -ltn | grep -q :{MASTER_PORT}"
        while lab.run(0, listens, check=False).returncode:
            assert child.poll() is None, child.communicate()[0]
            time.sleep(0.1)
        lab.signal(child, signal.SIGINT)
        screen, _ = child.communicate(timeout=WIDE_LIMIT_S)
        assert child.returncode == 3, screen
        assert "node1" in screen
        assert lab.run(0, "ss -ltnu | tail -n +2").stdout == ""
        left = lab.run(0, "cat /proc/[0-9]*/comm").stdout.split()
        assert not [name for name in left if name.startswith("python")], left


@pytest.mark.core
def test_a_stray_finding_is_a_miss() -> None:
    """The laboratory's own judgement: it must be able to say no."""
    trial = attempt(BY_NAME["port-differs"], Way(has_torch=False, options="--quick"))
    as_if_healthy = Trial(HEALTHY, trial.answers)
    assert misses(as_if_healthy)
    assert [describe(f) for answer in trial.answers for f in answer.loud]
