"""Where the secret comes from, and what happens where nodes do not have the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rankscope.preflight import secret
from rankscope.preflight.checks.secret import NodeSecret
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.key import RunKey
from rankscope.preflight.secret import Asked, SecretError, find
from rankscope.preflight.verdict.engine import evaluate, exit_code
from tests.preflight import healthy
from tests.preflight.healthy import having, judged
from tests.preflight.strangers.hostile import active

LONG = "a secret that is long enough to be one"


def home(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(tmp_path), **more}


def closed(path: Path, text: str = f"{LONG}\n") -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_what_is_given_comes_before_what_is_found(tmp_path: Path) -> None:
    file, other = closed(tmp_path / "a"), closed(tmp_path / "b", "another one of them\n")
    given = {secret.FILE_VARIABLE: str(other), "RANKSCOPE_TOKEN": "of the server"}
    every = home(tmp_path, **given, RANKSCOPE_PREFLIGHT_TOKEN=f" {LONG}x ")
    assert find(every, Asked(token_file=str(file))).text == LONG
    assert find(every, Asked()).text == f"{LONG}x"
    assert find(home(tmp_path, **given), Asked()).text == "another one of them"
    of_server = find(home(tmp_path, RANKSCOPE_TOKEN="of the server"), Asked())
    assert of_server.text.endswith("of the server")
    assert "of the server" not in repr(of_server) + of_server.source
    assert not (tmp_path / ".config").exists()


def test_one_node_alone_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = (find(home(tmp_path), Asked(is_alone=True)) for _ in range(2))
    assert first.text != second.text
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_start_at_once_agree_on_the_file_that_one_of_them_makes(tmp_path: Path) -> None:
    code = (
        "import os; from rankscope.preflight.secret import Asked, find;"
        "print(find(os.environ, Asked()).text)"
    )
    own = {**os.environ, **home(tmp_path), "XDG_CONFIG_HOME": ""}
    own = {name: text for name, text in own.items() if not name.startswith("RANKSCOPE")}

    def run(_: int) -> str:
        argv = [sys.executable, "-c", code]
        return subprocess.run(argv, env=own, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(8) as pool:
        said = set(pool.map(run, range(8)))
    assert len(said) == 1
    assert len(said.pop().strip()) == 32
    (key,) = (tmp_path / ".config" / "rankscope").iterdir()  # and no draft of the others
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700


def test_without_links_the_first_to_open_the_file_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert find(home(tmp_path), Asked()).text == find(home(tmp_path), Asked()).text


def test_a_home_that_cannot_be_written_costs_a_line_to_copy(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file, where there should be a directory")
    made = find(home(tmp_path), Asked())
    assert made.is_own
    assert made.notice.endswith(f"export RANKSCOPE_PREFLIGHT_TOKEN={made.text}")
    assert made.text not in made.source


def test_a_home_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(secret, "READ_LIMIT_S", 0.05)
    monkeypatch.setattr(secret, "_read_or_make", lambda path: str(answers.wait(60)))
    made = find(home(tmp_path), Asked())
    answers.set()
    assert made.is_own
    assert "does not answer" in made.notice


@pytest.mark.parametrize(("mode", "is_taken"), [(0o600, True), (0o400, True), (0o640, False),
                                                (0o604, False), (0o660, False)])  # fmt: skip
def test_a_file_that_others_can_read_is_refused_with_the_remedy(
    tmp_path: Path, mode: int, is_taken: bool
) -> None:
    path = closed(tmp_path / "it's")
    path.chmod(mode)
    if is_taken:
        assert find({}, Asked(token_file=str(path))).text == LONG
        return
    with pytest.raises(SecretError, match="chmod 600 ") as refused:
        find({}, Asked(token_file=str(path)))
    subprocess.run(["sh", "-c", re.split(r"change it: ", str(refused.value))[1]], check=True)
    assert find({}, Asked(token_file=str(path))).text == LONG


@pytest.mark.parametrize(
    ("environ", "asked", "why"),
    [
        ({"RANKSCOPE_PREFLIGHT_TOKEN": "short"}, Asked(), "5 characters can be guessed"),
        ({}, Asked(token_file="/nowhere/x"), "--token-file: /nowhere/x: No such file"),
        ({secret.FILE_VARIABLE: "/tmp"}, Asked(), "is no file|Is a directory"),
    ],
)
def test_a_secret_that_is_none_is_refused(environ: dict[str, str], asked: Asked, why: str) -> None:
    with pytest.raises(SecretError, match=why):
        find(environ, asked)


def test_a_shared_directory_serves_where_there_is_no_shared_home(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    homes = [tmp_path / name for name in "ab"]
    found = {find(home(one), Asked(share=str(share))).text for one in homes}
    assert len(found) == 1
    (share / secret.SHARED_NAME).chmod(0o644)  # another could know it: then not
    assert find(home(homes[0]), Asked(share=str(share))).text not in found
    assert find(home(homes[0]), Asked(share=str(tmp_path / "absent"))).path.startswith(
        str(homes[0])
    )
    assert not (tmp_path / "absent").exists()


def test_insecure_is_said(tmp_path: Path) -> None:
    environ = home(tmp_path, RANKSCOPE_PREFLIGHT_TOKEN=LONG)
    found = find(environ, Asked(is_insecure=True))
    assert found.text == ""
    assert "anyone" in found.notice


def test_keys_of_other_runs_and_uses_are_others() -> None:
    key = RunKey.of(LONG, "7")
    keys = {
        key.derived("share"), key.derived("meeting"), RunKey.of(LONG, "8").derived("share"),
        RunKey.of(f"{LONG}.", "7").derived("share"), RunKey.of("short", "7").derived("share"),
    }  # fmt: skip
    assert len(keys) == 5
    assert key.words_for_server() == RunKey.of(LONG, "7").words_for_server()
    assert LONG not in repr(key)


def refused(run_of: tuple[str, ...], odd: tuple[str, ...]) -> healthy.Run:
    """Return what nodes `run_of` know when the agents of `odd` do not share their secret."""
    dial = Dial(outcome="other-secret", address="10.77.0.9", port=29500)
    run = healthy.run({
        node: having("", edges={peer: EdgeFacts(mesh=dial) for peer in odd},
                     secret_from="/home/a b/.config/rankscope/preflight.key")
        for node in run_of
    })  # fmt: skip
    reports = {node: run.reports[node] for node in run_of}
    return healthy.Run("test", healthy.NODES, reports)


@pytest.mark.parametrize(
    ("run_of", "odd", "named"),
    [
        (("node0", "node1"), ("node2",), ("node2",)),
        (("node2",), ("node0", "node1"), ("node2",)),  # as node 2 sees it
        (("node1", "node2"), ("node0",), ("node0",)),
        (("node0",), ("node1", "node2"), ("node1", "node2")),  # they take node 0's
    ],
)
def test_the_nodes_that_differ_are_named_and_nothing_else_is_said_of_them(
    run_of: tuple[str, ...], odd: tuple[str, ...], named: tuple[str, ...]
) -> None:
    run = refused(run_of, odd)
    (finding,) = judged(NodeSecret(), run)
    assert finding.nodes == named
    for fix in finding.fix:
        assert re.search(r"export RANKSCOPE_PREFLIGHT_TOKEN=\"\$\(ssh node\d ", fix.command)
        assert "/home/a b/" not in active(fix.command)
    verdict = evaluate(run)
    assert "node.absent" not in {one.id for one in verdict.findings}
    assert exit_code(verdict) == 3


def test_where_all_share_one_secret_nothing_is_said() -> None:
    assert judged(NodeSecret(), healthy.run()) == []
