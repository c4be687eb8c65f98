"""After `rankscope uninstall --purge` nothing is left of what Rankscope wrote."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rankscope.files.start_collector import take_lock

SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which all that is written is below a folder of the test."""
    # without RANKSCOPE_DIR it would remove what was recorded on this machine
    own = {"HOME": "home", "TMPDIR": "tmp", "RANKSCOPE_DIR": "runs"}
    for name in own.values():
        (tmp_path / name).mkdir(mode=0o700)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")}
    kept = {name: value for name, value in kept.items() if not name.startswith("XDG_")}
    return kept | {name: str(tmp_path / folder) for name, folder in own.items()}


def rankscope(environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankscope", *words], env=environ, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def kinds(environ: Mapping[str, str]) -> set[str]:
    shown = rankscope(environ, "uninstall", "--json")
    return {one["kind"] for one in json.loads(shown.stdout)["found"]}


@pytest.mark.multiproc
def test_a_machine_is_as_it_was(tmp_path: Path, environ: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = files(tmp_path)
    ran = rankscope(
        environ, "run", "--", sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(script),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    checked = rankscope(environ, "preflight", "--quick")
    assert checked.returncode in (0, 1), checked.stderr
    store = Path(environ["HOME"], ".local/share/rankscope")
    store.mkdir(parents=True)
    (store / "rankscope.db").write_bytes(b"")
    assert kinds(environ) >= {"run", "store"}
    shown = rankscope(environ, "uninstall")
    assert (shown.returncode, "pip uninstall rankscope" in shown.stdout) == (0, True)
    refused = rankscope(environ, "uninstall", "--purge")  # no terminal, and no --yes
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert kinds(environ) >= {"run", "store"}
    kept = rankscope(environ, "uninstall", "--purge", "--yes", "--keep-store", "--json")
    assert (kept.returncode, json.loads(kept.stdout)["left"]) == (0, [])
    assert kinds(environ) == {"store"}
    assert rankscope(environ, "uninstall", "--purge", "--yes").returncode == 0
    ours = {"home/.local", "home/.cache", "home/.config"}  # folders of all programs of a user
    left = files(tmp_path) - before - ours - {"home/.local/share"}
    assert [path for path in left if "torchelastic" not in path] == []  # which torchrun leaves


def test_what_is_in_use_stays_and_is_said(tmp_path: Path, environ: dict[str, str]) -> None:
    runs = Path(environ["RANKSCOPE_DIR"])
    for name in ("held", "free"):
        (runs / name / "node").mkdir(parents=True)
    (runs / "mine.txt").write_text("no file of ours")
    store = Path(environ["HOME"], ".local/share/rankscope")
    store.mkdir(parents=True)
    descriptor = take_lock(runs / "held")
    assert descriptor is not None
    with (store / "rankscope.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        purged = rankscope(environ, "uninstall", "--purge", "--yes")
    os.close(descriptor)
    assert purged.returncode == 1
    assert "its collector uses it" in purged.stderr
    assert "a server uses it" in purged.stderr
    assert sorted(path.name for path in runs.iterdir()) == ["held", "mine.txt"]
    assert (store / "rankscope.db.lock").exists()
