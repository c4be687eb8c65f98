"""What is handed out: complete, as its sums say, and installed where nothing can be fetched."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rankscope import __version__
from tests import capabilities
from tests.fresh.system import CannotBuild, archive

pytestmark = pytest.mark.together("packages")

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "deploy" / "packages" / "build.py"
MOST_BYTES = 20e6  # of all that `pip install rankscope` brings besides numpy
# What the package needs of Debian 12; `apt-get install ./rankscope.deb` would fetch it.
NEEDED = ("python3", "python3-venv", "adduser")
OFFLINE = ("unshare", "--net")
# Within a network of its own, without any way out: starts the server and asks for its page.
SERVE = """
import subprocess, sys, time, urllib.request
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = subprocess.Popen([sys.argv[1], "serve", "--port", "18787", "--data-dir", sys.argv[2]])
try:
    for _ in range(300):
        try:
            with urllib.request.urlopen("http://127.0.0.1:18787/api/v1/ready", timeout=5) as ready:
                print("ready", ready.status)
                break
        except OSError:
            time.sleep(0.1)
    with urllib.request.urlopen("http://127.0.0.1:18787/", timeout=5) as page:
        print(page.read().decode())
finally:
    server.terminate()
    print("ended", server.wait(30))
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything for the server alone: its other extras are 120 MB more."""
    out = tmp_path_factory.mktemp("packages")
    command = [sys.executable, str(BUILD), "--out", str(out), "--extras", "server", "--deb"]
    if capabilities.find("dpkg-deb") is None:
        command.remove("--deb")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def bundle(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle unpacked."""
    folder = tmp_path_factory.mktemp("bundle")
    (packed,) = built.glob("*.tar")
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_sums_are_those_of_all_files(built: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=built, capture_output=True)
    assert done.returncode == 0, done.stdout
    named = {line.split()[1] for line in (built / "SHA256SUMS").read_text().splitlines()}
    assert named == {path.name for path in built.iterdir()} - {"SHA256SUMS"}


@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_the_wheel_has_the_dashboard_and_no_tests(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        pages = {path.name for path in (ROOT / "web" / "app" / "pages").iterdir()}
        assert pages <= {Path(n).name for n in names if n.startswith("rankscope_server/web/app/")}
        assert [name for name in names if name.endswith("licenses/LICENSE")]
        assert not [name for name in names if "tests" in name.split("/") or "__pycache__" in name]
        metadata = packed.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert f"Version: {__version__}\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_the_sources_make_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (packed,) = built.glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path,
         _unpacked(packed, tmp_path)],
        check=True, capture_output=True,
    )  # fmt: skip
    (mine,), (theirs,) = tmp_path.glob("*.whl"), built.glob("*.whl")
    assert _contents(mine) == _contents(theirs)


def _unpacked(packed: Path, folder: Path) -> Path:
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    return folder / packed.name.removesuffix(".tar.gz")


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_what_is_in_the_bundle_is_written_down(built: Path, bundle: Path) -> None:
    document = json.loads((bundle / "sbom.cdx.json").read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    listed = {_plain(one["name"]): one["version"] for one in document["components"]}
    wheels = {path.name.split("-")[0]: path for path in (bundle / "wheels").glob("*.whl")}
    for name, path in wheels.items():
        if name != "rankscope":  # of which the rest are the parts
            assert listed[_plain(name)] == path.name.split("-")[1]
    pinned = (bundle / "requirements.txt").read_text().splitlines()
    assert len(pinned) == len(wheels)
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in pinned)
    assert (built / f"{bundle.name}.cdx.json").read_bytes() == (
        bundle / "sbom.cdx.json"
    ).read_bytes()


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.multiproc
@pytest.mark.needs("namespaces", "root")
@pytest.mark.timeout(900)
def test_the_bundle_installs_and_serves_without_a_network(bundle: Path, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable}
    place = tmp_path / "env"
    done = subprocess.run(
        [*OFFLINE, bundle / "install", place], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"installed: {place}/bin/rankscope\n"
    served = subprocess.run(
        [*OFFLINE, place / "bin" / "python", "-c", SERVE, place / "bin" / "rankscope",
         tmp_path / "data"],
        env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "ready 200" in served.stdout, served.stderr
    assert "The same data is at" in served.stdout, "the page itself"
    assert "ended 0" in served.stdout


@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_another_python_and_a_changed_wheel_are_refused(bundle: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho cp39\n")
    old.chmod(0o755)
    done = _install(bundle, tmp_path / "env", str(old))
    assert done.returncode == 1
    assert f"these wheels are for cp3{sys.version_info.minor}, {old} is cp39" in done.stderr
    assert f"set PYTHON=python3.{sys.version_info.minor}" in done.stderr
    (wheel,) = (bundle / "wheels").glob("rich-*.whl")
    whole = wheel.read_bytes()
    try:
        wheel.write_bytes(whole + b"\0")
        done = _install(bundle, tmp_path / "env", sys.executable)
        assert done.returncode != 0
        assert "DO NOT MATCH THE HASHES" in done.stderr
    finally:
        wheel.write_bytes(whole)


def _install(bundle: Path, place: Path, python: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(place), "PYTHON": python}
    return subprocess.run(
        [bundle / "install", place], env=environ, capture_output=True, text=True, timeout=300
    )


@dataclass(frozen=True)
class Debian:
    """A bare Debian 12 that has what the package needs, and no network."""

    folder: Path

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of a shell in it, as root."""
        return subprocess.run(
            [*OFFLINE, "chroot", self.folder, "/bin/sh", "-c", line],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip


@pytest.fixture
def debian() -> Iterator[Debian]:
    try:
        packed = archive("bookworm", NEEDED)
    except CannotBuild as error:
        pytest.skip(f"no bare system: {error}")
    with tempfile.TemporaryDirectory(prefix="rankscope-deb.", dir="/var/tmp") as folder:
        subprocess.run(
            ["tar", "--extract", "--file", packed, "--directory", folder, "--numeric-owner"],
            check=True,
        )  # fmt: skip
        yield Debian(Path(folder))


@pytest.mark.multiproc
@pytest.mark.needs("bare-root")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Debian 12 has Python 3.11")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one bare system is enough")
@pytest.mark.timeout(1800)
def test_the_debian_package_comes_and_goes(built: Path, debian: Debian) -> None:
    (package,) = built.glob("*.deb")
    (debian.folder / package.name).write_bytes(package.read_bytes())
    done = debian.run(f"dpkg --install /{package.name}")
    assert done.returncode == 0, done.stderr
    said = debian.run("rankscope --version")
    assert said.stdout.split()[-1] == __version__, said.stderr
    assert debian.run("getent passwd rankscope").stdout
    checked = debian.run("rankscope serve --check --data-dir /var/lib/rankscope")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for unit in ("rankscope-server.service", "rankscope-.service.d"):
        assert (debian.folder / "usr/lib/systemd/system" / unit).exists()
    assert debian.run("dpkg --remove rankscope").returncode == 0
    assert not (debian.folder / "opt/rankscope").exists()
    assert debian.run("dpkg --purge rankscope").returncode == 0
    left = debian.run("find / -xdev -mindepth 2 -name '*rankscope*' -not -path '/proc/*'")
    assert left.stdout == "", "nothing stays behind"


@pytest.mark.parametrize(
    ("version", "debians"),
    [("0.1.0", "0.1.0"), ("1.0rc1", "1.0~rc1"), ("1.0.dev3", "1.0~dev3"), ("2.0b2", "2.0~b2")],
)
def test_versions_are_in_the_order_of_debian(version: str, debians: str) -> None:
    names: dict[str, Any] = runpy.run_path(str(BUILD))
    assert names["debian_version"](version) == debians
