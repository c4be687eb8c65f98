"""Attacks on real agents: none gets anywhere, and the honest preflight beside each passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.faults import Expected, Fault
from tests.preflight.scene import Scene
from tests.preflight.strangers.hostile import is_acting
from tests.preflight.trial import ROOT, Trial, Way, attempt, misses

STRANGER = 3  # the number of its host
HONEST = "node0,node1,node2"
ATTACKER = Path(__file__).with_name("attacker.py")
pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip


def beside(
    kept: Path, attack: str, is_expected: bool = False, options: str = "", **more: Any
) -> Trial:
    """Run an honest preflight of three nodes on a wire with a stranger; `attack` is what it does.

    `is_expected`: the nodes wait for the stranger's host, too.
    """

    def build(scene: Scene) -> None:
        for number in scene.everywhere:
            scene.say(number, num_nodes=4 if is_expected else 3)
        scene.missing.add(STRANGER)
        where = [scene.lab.ip(number) for number in range(STRANGER)]
        if attack == "share":
            where = [str(scene.shared)]
        start(scene, STRANGER, attack, kept, where)
        if attack == "replay":
            start(scene, 0, "record", kept, [])

    nodes = HONEST + (",node3" if is_expected else "")
    quick = f"--quick --nodes {nodes} {options}"
    way = Way(num_hosts=4, has_torch=False, is_forked=False, options=quick, **more)
    return attempt(Fault("stranger", attack, build, expected(is_expected)), way)


def expected(is_absent: bool) -> tuple[Expected, ...]:
    return (Expected("node.absent", nodes=("node3",)),) if is_absent else ()


def start(scene: Scene, number: int, attack: str, kept: Path, where: list[str]) -> None:
    paths = os.pathsep.join((str(ROOT / "agent"), str(ROOT)))
    words = [sys.executable, str(ATTACKER), attack, str(kept), *where]
    own = {name: text for name, text in scene.lab.environment(number).items()
           if not name.startswith("RANKSCOPE")}  # fmt: skip
    with kept.with_suffix(".errors").open("w") as errors:
        scene.lab.popen(
            number, words, env={**own, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL,
            stderr=errors,
        )  # fmt: skip


def brought(kept: Path) -> list[str]:
    """Return what the attempts brought that there were; there must have been some."""
    assert kept.exists(), kept.with_suffix(".errors").read_text()
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert rows
    return [row["got"] for row in rows]


def untouched(trial: Trial) -> None:
    """Check that the honest nodes passed, and that nothing acts on their screens."""
    assert not misses(trial), [answer.screen for answer in trial.answers]
    for answer in trial.answers:
        for line in answer.screen.split("\n"):
            assert not any(map(is_acting, line)), line
            assert "taken" not in line, line


REFUSED = ("", '{"rankscope_preflight":2,"refused":"secret"}\n',
           '{"rankscope_preflight":2,"refused":"version"}\n')  # fmt: skip


@pytest.mark.parametrize(
    "attack",
    [
        "read", "replace", "forge_node", "newline", "escapes", "oversized", "slow", "idle",
        "wrong_proof", "downgrade",
    ],
)  # fmt: skip
def test_a_stranger_learns_and_changes_nothing(attack: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    untouched(beside(kept, attack))
    for got in brought(kept):
        assert got in REFUSED


def test_what_was_recorded_is_worth_nothing_later(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    untouched(beside(kept, "replay"))
    assert kept.with_suffix(".heard").exists()
    got = [one for one in brought(kept) if one]
    assert got
    for one in got:  # a challenge, which the one who repeats a hello cannot answer
        first, _, rest = one.partition("\n")
        assert json.loads(first).keys() >= {"nonce", "proof"}
        assert rest == ""


def test_reports_forged_in_the_shared_directory_are_not_believed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    trial = beside(kept, "share", options="--share {shared}")
    untouched(trial)
    brought(kept)
    for answer in trial.answers:
        assert answer.verdict is not None
        assert answer.verdict.reported == tuple(HONEST.split(","))
    assert any("not believed" in answer.screen for answer in trial.answers)


def test_what_a_stranger_answers_is_shown_as_text(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    trial = beside(kept, "answer", is_expected=True, options="--wait 3")
    brought(kept)
    untouched_but_for = misses(trial)
    assert not untouched_but_for, [answer.screen for answer in trial.answers]
    for answer in trial.answers:
        for line in answer.screen.split("\n"):
            assert not any(map(is_acting, line)), line
        for fix in (fix for finding in answer.loud for fix in finding.fix):
            assert "touch" not in fix.command


def without_a_secret(scene: Scene) -> None:
    """Give no host a secret, and all of them one home directory, as clusters do."""
    for number in scene.everywhere:
        scene.lab.env[number] |= {
            "RANKSCOPE_PREFLIGHT_TOKEN": "", "XDG_CONFIG_HOME": str(scene.shared / "config"),
        }  # fmt: skip


def test_nodes_with_one_home_directory_need_nothing() -> None:
    fault = Fault("key file", "no secret was given", without_a_secret, ())
    trial = attempt(fault, Way(has_torch=False, options="--quick"))
    assert not misses(trial), [answer.screen for answer in trial.answers]
    for answer in trial.answers:
        assert "secret" not in answer.screen
        assert "TOKEN" not in answer.screen


def with_another(scene: Scene) -> None:
    """Give node 2 another secret."""
    scene.lab.env[2]["RANKSCOPE_PREFLIGHT_TOKEN"] = "not that of the others"


def test_a_node_with_another_secret_is_named_by_all() -> None:
    wanted = (Expected("node.secret", nodes=("node2",), remedy="RANKSCOPE_PREFLIGHT_TOKEN"),)
    fault = Fault("secret", "node 2 has another secret", with_another, wanted)
    trial = attempt(fault, Way(has_torch=False, options="--quick --wait 4"))
    assert not misses(trial), [answer.screen for answer in trial.answers]
    for answer in trial.answers:
        assert "not that of the others" not in answer.screen


def homes_apart(scene: Scene) -> None:
    """Give no host a secret, and each a home directory of its own."""
    without_a_secret(scene)
    for number in scene.everywhere:
        scene.lab.env[number]["XDG_CONFIG_HOME"] = str(scene.shared / f"config{number}")


def test_where_homes_are_apart_node_0_shows_what_to_copy() -> None:
    wanted = (Expected("node.secret", nodes=("node1", "node2")),)
    fault = Fault("homes", "no home is shared", homes_apart, wanted, agree=False)
    trial = attempt(fault, Way(has_torch=False, options="--quick --wait 4"))
    first = trial.answers[0]
    assert first.exit_code == 3, first.screen
    assert [one.id for one in first.loud] == ["node.secret"], first.screen
    assert first.loud[0].nodes == ("node1", "node2")
    shown = [line for line in first.screen.split("\n") if "start it again: export RANKSC" in line]
    assert len(shown) == 1, first.screen


def test_insecure_lets_nodes_meet_and_says_what_that_means() -> None:
    fault = Fault("insecure", "no secret", homes_apart, ())
    trial = attempt(fault, Way(has_torch=False, options="--quick --insecure"))
    assert not misses(trial), [answer.screen for answer in trial.answers]
    assert all("anyone who reaches this node" in answer.screen for answer in trial.answers)
