"""Commit and state of a checkout, read from its files, against what git itself says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope.process.code_version import code_facts

LONG = 5.0  # seconds: no test waits for it
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """A checkout with a script, a package and a hook that fails when it is run."""

    def run(*words: str, folder: Path = tmp_path / "repo") -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0", *words]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True,
                              check=True)  # fmt: skip
        return done.stdout.strip()

    (tmp_path / "repo" / "package").mkdir(parents=True)
    (tmp_path / "repo" / "train.py").write_text("print(1)\n")
    (tmp_path / "repo" / "package" / "a longer name of a file.py").write_text("x = 1\n")
    (tmp_path / "repo" / "package" / "model.py").write_text("y = 1\n")
    run("init", "-q", "-b", "main")
    run("add", "-A")
    run("commit", "-qm", "first")
    old = 1_600_000_000
    for path in (tmp_path / "repo").rglob("*.py"):
        os.utime(path, (old, old))
    run("update-index", "--refresh")
    return run


def facts(tmp_path: Path) -> dict[str, str]:
    return code_facts(tmp_path / "repo" / "train.py", LONG)


def test_commit_and_state_are_those_of_git(git: Git, tmp_path: Path) -> None:
    found = facts(tmp_path)
    assert found["code.script"] == "train.py"
    assert found["code.commit"] == git("rev-parse", "HEAD")
    assert found["code.dirty"] == "no"
    (tmp_path / "repo" / "new.txt").write_text("not tracked")
    assert facts(tmp_path)["code.dirty"] == "no"
    (tmp_path / "repo" / "package" / "model.py").write_text("y = 1234\n")
    changed = facts(tmp_path)
    assert changed["code.dirty"] == "yes"
    assert changed["code.hash"] == found["code.hash"]
    (tmp_path / "repo" / "train.py").write_text("print(2)\n")
    assert facts(tmp_path)["code.hash"] != found["code.hash"]


def test_a_file_of_the_same_size_is_compared_by_content(git: Git, tmp_path: Path) -> None:
    model = tmp_path / "repo" / "package" / "model.py"
    os.utime(model)
    assert facts(tmp_path)["code.dirty"] == "no"  # touched, as by a copy
    model.write_text("y = 2\n")
    assert facts(tmp_path)["code.dirty"] == "yes"
    model.unlink()
    assert facts(tmp_path)["code.dirty"] == "yes"
    git("checkout", "-q", "--", ".")
    assert facts(tmp_path)["code.dirty"] == "no"


@pytest.mark.parametrize("version", [2, 3, 4])
def test_every_version_of_the_index(git: Git, tmp_path: Path, version: int) -> None:
    git("update-index", "--index-version", str(version))
    if version == 3:  # made only where an entry needs it
        git("update-index", "--skip-worktree", "package/model.py")
        (tmp_path / "repo" / "package" / "model.py").write_text("left out on purpose")
    assert (tmp_path / "repo" / ".git" / "index").read_bytes()[7] == version
    assert facts(tmp_path)["code.dirty"] == "no"
    (tmp_path / "repo" / "package" / "a longer name of a file.py").write_text("x = 22\n")
    assert facts(tmp_path)["code.dirty"] == "yes"


def test_packed_detached_worktree_and_no_commit(git: Git, tmp_path: Path) -> None:
    head = git("rev-parse", "HEAD")
    git("pack-refs", "--all")
    assert facts(tmp_path)["code.commit"] == head
    git("checkout", "-q", "--detach")
    assert facts(tmp_path)["code.commit"] == head
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    found = code_facts(tmp_path / "tree" / "train.py", LONG)
    assert (found["code.commit"], found["code.dirty"]) == (head, "no")
    (tmp_path / "fresh").mkdir()
    git("init", "-q", folder=tmp_path / "fresh")
    (tmp_path / "fresh" / "train.py").write_text("")
    assert "code.commit" not in code_facts(tmp_path / "fresh" / "train.py", LONG)


def test_sha256_checkouts(git: Git, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    try:
        git("init", "-q", "--object-format=sha256", folder=folder)
    except subprocess.CalledProcessError:
        pytest.skip("this git knows no sha256")
    (folder / "train.py").write_text("1")
    git("add", "-A", folder=folder)
    git("commit", "-qm", "x", folder=folder)
    found = code_facts(folder / "train.py", LONG)
    assert found["code.commit"] == git("rev-parse", "HEAD", folder=folder)
    assert found["code.dirty"] == "no"
    (folder / "train.py").write_text("2")
    assert code_facts(folder / "train.py", LONG)["code.dirty"] == "yes"


def test_no_time_and_no_known_index_is_unknown(git: Git, tmp_path: Path) -> None:
    assert code_facts(tmp_path / "repo" / "train.py", -1.0)["code.dirty"] == "unknown"
    index = tmp_path / "repo" / ".git" / "index"
    whole = index.read_bytes()
    for broken in (b"", b"DIRC", whole[:90], b"DIRC\0\0\0\x09" + whole[8:]):
        index.write_bytes(broken)
        assert facts(tmp_path)["code.dirty"] == "unknown"


def test_no_hook_is_run_and_nothing_is_written(git: Git, tmp_path: Path) -> None:
    hooks = tmp_path / "repo" / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "post-index-change", "fsmonitor-watchman"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (hooks / name).chmod(0o755)
    git("config", "core.fsmonitor", str(hooks / "fsmonitor-watchman"))
    os.utime(tmp_path / "repo" / "train.py")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "repo").rglob("*")}
    assert facts(tmp_path)["code.dirty"] == "no"
    assert not (tmp_path / "ran").exists()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "repo").rglob("*")} == before


def test_a_script_outside_a_checkout_or_gone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    found = code_facts(tmp_path / "train.py")
    assert set(found) - {"code.commit", "code.dirty"} == {"code.script", "code.hash"}
    assert code_facts(tmp_path / "missing.py") == {}
