from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.files import run_directory_choice as choice
from rankscope.files.run_directory import run_directory
from rankscope.files.start_collector import take_lock
from tests import capabilities


def mounts(*lines: tuple[str, str]) -> str:
    """Return what /proc/self/mountinfo says of these (mount point, type) pairs."""
    return "".join(
        f"{number} 1 0:{number} / {point} rw,relatime shared:1 - {kind} source rw\n"
        for number, (point, kind) in enumerate((("/", "ext4"), *lines), 30)
    )


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuseblk", "lustre"])
def test_a_network_file_system_is_refused_with_its_name(tmp_path: Path, kind: str) -> None:
    wanted = tmp_path / "shared" / "runs"
    local = tmp_path / "local"
    local.mkdir()
    environ = {"RANKSCOPE_DIR": str(wanted), "TMPDIR": str(local)}
    chosen = choice.choose(environ, mounts((str(tmp_path / "shared"), kind)))
    assert chosen.base == local / f"rankscope-{os.getuid()}"
    assert chosen.note.startswith(f"{wanted}: {kind} is a network or user-space file system")
    assert chosen.note.endswith(f"files are in {chosen.base} instead")
    assert not wanted.exists()


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    chosen = choice.choose({"RANKSCOPE_DIR": str(tmp_path)}, mounts())
    assert chosen == choice.DirectoryChoice(tmp_path)
    assert choice.choose({"RANKSCOPE_DIR": str(tmp_path)}).base == tmp_path  # the real mounts


def test_two_hosts_that_may_share_a_directory_do_not_share_a_lock(tmp_path: Path) -> None:
    environ = {"RANKSCOPE_DIR": str(tmp_path)}
    unknown = mounts((str(tmp_path), "newfs"))
    first, second = (choice.choose(environ, unknown, host).base for host in ("node-1", "node-2"))
    assert (first, second) == (tmp_path / "node-1", tmp_path / "node-2")
    held = [take_lock(run_directory(base, "same-run")) for base in (first, second)]
    assert None not in held
    assert take_lock(run_directory(first, "same-run")) is None
    for descriptor in held:
        os.close(descriptor or -1)


def test_the_most_specific_and_latest_mount_counts() -> None:
    text = mounts(("/data", "nfs4"), ("/data/local", "xfs"), ("/data/my\\040disk", "fuse.x"))
    assert choice.file_system(Path("/data/x/y"), text) == "nfs4"
    assert choice.file_system(Path("/data/local/y"), text) == "xfs"
    assert choice.file_system(Path("/data/localhost"), text) == "nfs4"
    assert choice.file_system(Path("/data/my disk/y"), text) == "fuse.x"
    assert choice.file_system(Path("/data/y"), text + mounts(("/data", "ext4"))) == "ext4"
    assert choice.file_system(Path("/data"), "") == ""
    assert choice.file_system(Path("/data"), "noise\n - \n") == ""


def test_without_anything_set_a_directory_of_the_user(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    assert choice.choose({"XDG_RUNTIME_DIR": str(runtime)}, mounts()).base == runtime / "rankscope"
    missing = {"XDG_RUNTIME_DIR": str(tmp_path / "none" / "x"), "TMPDIR": str(tmp_path / "no")}
    (tmp_path / "none").touch()
    chosen = choice.choose(missing, mounts())
    assert chosen.base == tmp_path / "no" / f"rankscope-{os.getuid()}"  # can be made
    (tmp_path / "no").touch()
    assert choice.choose(missing, mounts()).base == Path(f"/tmp/rankscope-{os.getuid()}")
    assert not choice.choose(missing, mounts()).note  # nobody asked


def test_nowhere_says_why_of_each_place(tmp_path: Path) -> None:
    environ = {"RANKSCOPE_DIR": str(tmp_path)}
    with pytest.raises(choice.NoDirectoryError, match=r"/var/tmp.*nfs4 is a network.*/dev/shm"):
        choice.choose(environ, mounts(("/", "nfs4")))


@pytest.mark.needs("root")
def test_a_directory_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / f"rankscope-{os.getuid() + 1}"
    own.mkdir()
    os.chown(own, os.getuid() + 2, -1)
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert choice.choose({"TMPDIR": str(tmp_path)}, mounts()).base != own


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, as some containers have at /dev/shm."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    capabilities.need("mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_tiny_or_read_only_file_system_is_passed_over(tiny: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tiny), "TMPDIR": str(tiny.parent)}
    beside = tiny.parent / f"rankscope-{os.getuid()}"
    assert choice.choose(environ).base == beside
    subprocess.run(["mount", "-o", "remount,ro,size=64m", str(tiny)], check=True)
    assert choice.choose(environ).base == beside
    subprocess.run(["mount", "-o", "remount,rw,size=64m", str(tiny)], check=True)
    assert choice.choose(environ).base == tiny / "rankscope"
