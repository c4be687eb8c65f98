"""Directories as they are: real files, real locks, and a mount that never answers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.preflight.facts import storage
from rankscope.preflight.options import Options
from rankscope.preflight.system import Done, System
from tests import capabilities

NODES = ("node0", "node1", "node2")


def options(folder: Path, **more: Any) -> Options:
    return Options(checkpoint_dir=str(folder), **more)


@pytest.fixture
def system(tmp_path: Path) -> System:
    (tmp_path / "tmp").mkdir()
    return System(environ={"TMPDIR": str(tmp_path / "tmp"), "HF_HOME": "/nonexistent/hf"})


def test_a_healthy_directory(system: System, tmp_path: Path) -> None:
    folder = tmp_path / "check point"  # a space, for mountinfo and the shell
    folder.mkdir()
    facts = storage.collect(system, options(folder), "run", "node0")
    checkpoint = facts.folder("checkpoint")
    assert checkpoint is not None
    assert checkpoint.is_directory
    assert checkpoint.is_writable
    assert not checkpoint.is_hung
    assert checkpoint.free_bytes == pytest.approx(shutil.disk_usage(folder).free, rel=0.2)
    assert checkpoint.file_system
    assert checkpoint.mount_source
    assert facts.written is not None
    assert facts.written.written_bytes > 0
    assert facts.written.elapsed_s > 0
    assert facts.locked == storage.Locked()
    assert facts.token
    assert os.listdir(folder) == [".rankscope-preflight-run-node0"]  # the tests' files are gone
    hf = facts.folder("HF_HOME")
    assert hf is not None
    assert hf.error.startswith("ENOENT")
    storage.clean(system, options(folder), "run", "node0")
    assert os.listdir(folder) == []


def test_nodes_see_each_other_and_clean_up_their_own(system: System, tmp_path: Path) -> None:
    asked = options(tmp_path, tier="quick")
    facts = {node: storage.collect(system, asked, "run", node) for node in NODES}
    assert facts["node0"].written is None  # not with --quick
    for node in NODES:
        seen = storage.see_others(system, asked, "run", NODES, facts[node]).seen
        assert seen == {name: one.token for name, one in facts.items()}
    storage.clean(system, asked, "run", "node1")
    left = {name for name in os.listdir(tmp_path) if name.startswith(".rankscope")}
    assert left == {".rankscope-preflight-run-node0", ".rankscope-preflight-run-node2"}


def test_an_unfinished_file_is_not_believed(system: System, tmp_path: Path) -> None:
    asked = options(tmp_path, tier="quick")
    facts = storage.collect(system, asked, "run", "node0")
    (tmp_path / ".rankscope-preflight-run-node1").write_text("")
    program = "import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').write('t')"
    path = str(tmp_path / ".rankscope-preflight-run-node1")
    late = subprocess.Popen([sys.executable, "-c", program, path])
    seen = storage.see_others(system, asked, "run", ("node0", "node1"), facts).seen
    assert late.wait() == 0
    assert seen == {"node0": facts.token, "node1": "t"}


def test_in_a_large_job_all_that_share_are_connected() -> None:
    nodes = [f"node{number}" for number in range(500)]
    of = {node: set(storage._whom(nodes, f"token of {node}")) for node in nodes}
    assert max(map(len, of.values())) <= storage.NUM_FIRST + storage.NUM_DRAWN
    for gone in (set(), {"node0"}, {"node0", "node1"}):  # who shares with nobody
        assert set.intersection(*(of[node] for node in nodes)) - gone
    assert storage._whom(nodes[:64], "t") == nodes[:64]


def test_who_is_alone_sees_only_itself(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SEE_SECONDS", 0.3)
    asked = options(tmp_path, tier="quick")
    facts = storage.collect(system, asked, "run", "node0")
    assert storage.see_others(system, asked, "run", NODES, facts).seen == {"node0": facts.token}


def test_a_missing_directory_is_told_and_nothing_is_tried(system: System, tmp_path: Path) -> None:
    asked = options(tmp_path / "absent")
    facts = storage.collect(system, asked, "run", "node0")
    assert facts.token == ""
    assert facts.written is None
    assert storage.see_others(system, asked, "run", NODES, facts) == facts
    storage.clean(system, asked, "run", "node0")  # does nothing, says nothing


@pytest.mark.needs("ordinary-user")
def test_a_directory_of_another_is_not_writable(system: System) -> None:
    facts = storage.collect(system, options(Path("/etc")), "run", "node0")
    assert facts.token_error.startswith("EACCES")


def test_names_of_nodes_are_no_paths(system: System, tmp_path: Path) -> None:
    asked = options(tmp_path, tier="quick")
    storage.collect(system, asked, "../../r", "../evil")
    (name,) = [name for name in os.listdir(tmp_path) if name.startswith(".rankscope")]
    assert "/" not in name
    storage.clean(system, asked, "../../r", "../evil")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".rankscope")]


@pytest.fixture
def hung_mount(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system in user space whose server never answers."""
    capabilities.need("fuse")
    folder = tmp_path / "hung"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR)
    told = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    target = str(folder).encode()
    assert libc.mount(b"hung", target, b"fuse", 0, told.encode()) == 0
    try:
        yield folder
    finally:
        os.close(server)  # who waits for an answer is let go
        assert libc.umount2(target, 2) == 0


def test_a_hung_mount_does_not_hang_us(
    hung_mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage._child, "__kwdefaults__", {"limit_s": 2.0, "times": 2})
    system = System(environ={"TMPDIR": str(tmp_path)})
    started = time.monotonic()
    facts = storage.collect(system, options(hung_mount), "run", "node0")
    took = time.monotonic() - started
    checkpoint = facts.folder("checkpoint")
    assert checkpoint is not None
    assert checkpoint.is_hung
    assert facts.token == ""
    other = facts.folder("TMPDIR")
    assert other is not None
    assert other.is_directory  # looked at beside it
    assert took < 30  # not for ever: the mount never answers


@pytest.mark.needs("mount")
def test_a_full_disk_is_told(tmp_path: Path, system: System) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "full"
    folder.mkdir()
    target = str(folder).encode()
    assert libc.mount(b"full", target, b"tmpfs", 0, b"size=8m") == 0
    try:
        facts = storage.collect(system, options(folder), "run", "node0")
    finally:
        assert libc.umount2(target, 2) == 0
    assert facts.written is not None
    assert facts.written.error.startswith("ENOSPC")
    checkpoint = facts.folder("checkpoint")
    assert checkpoint is not None
    assert checkpoint.file_system == "tmpfs"
    assert checkpoint.total_bytes == 8 << 20


@pytest.mark.needs("mount")
def test_a_read_only_mount_is_told(tmp_path: Path, system: System) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "ro"
    folder.mkdir()
    target, read_only = str(folder).encode(), 1
    assert libc.mount(b"ro", target, b"tmpfs", read_only, b"") == 0
    try:
        facts = storage.collect(system, options(folder), "run", "node0")
    finally:
        assert libc.umount2(target, 2) == 0
    checkpoint = facts.folder("checkpoint")
    assert checkpoint is not None
    assert checkpoint.is_read_only
    assert facts.token_error.startswith("EROFS")


def test_a_fingerprint_of_data_is_of_names_and_sizes(system: System, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a.bin").write_bytes(b"12345")
        (folder / "b.bin").write_bytes(b"1")
    told = [storage.fingerprint(system, str(folder), 100, 2.0) for folder in (one, two)]
    assert told[0] == told[1]
    assert (told[0]["count"], told[0]["bytes"], told[0]["cut"]) == (2, 6, "")
    (two / "b.bin").write_bytes(b"12")
    assert storage.fingerprint(system, str(two), 100, 2.0)["digest"] != told[0]["digest"]
    assert storage.fingerprint(system, str(two), 1, 2.0)["cut"] == "count"
    assert "ENOENT" in storage.fingerprint(system, str(tmp_path / "absent"), 1, 2.0)["error"]


def test_a_child_that_breaks_says_why(tmp_path: Path) -> None:
    class Broken(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            return Done(1, err="Traceback\nMemoryError")

    facts = storage.collect(Broken(environ={"TMPDIR": "/tmp"}), options(tmp_path), "r", "n")
    assert {folder.not_known for folder in facts.folders} == {"not known: MemoryError"}
    assert not any(folder.error or folder.is_hung for folder in facts.folders)


def test_a_machine_that_is_too_busy_to_look_accuses_no_disk(tmp_path: Path) -> None:
    class Busy(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            return super().run(["sleep", "60"], 0.2)

    facts = storage.collect(Busy(environ={"TMPDIR": "/tmp"}), options(tmp_path), "r", "n")
    assert all(folder.not_known and not folder.is_hung for folder in facts.folders)
    assert not facts.has_checkpoint
