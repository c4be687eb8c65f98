"""The units of `deploy/systemd`: systemd takes them, they expose little, and the server lives."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from functools import cache
from pathlib import Path

import httpx
import pytest

from rankscope_server.settings import SETTINGS
from rankscope_server.settings import Settings as ServerSettings
from tests.server.balancers import DEPLOY
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run

ROOT, UNITS = DEPLOY.parent, DEPLOY / "systemd"
COMMON = UNITS / "rankscope-.service.d" / "rankscope.conf"
MOST_EXPOSED = 1.5  # of 10; what `systemd-analyze security` calls OK ends at 3.0
INSTALLED = "/opt/rankscope/bin/"
# What MemoryDenyWriteExecute= asks of a kernel since 6.3; the process that is started inherits it.
DENIED = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
    raise SystemExit("memory cannot be denied")
os.execvp(sys.argv[1], sys.argv[1:])
"""

pytestmark = pytest.mark.needs("systemd-analyze")


def analyze(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `systemd-analyze` with the units of a folder before those of the machine."""
    return subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{folder}:", "SYSTEMD_PAGER": ""},
    )  # fmt: skip


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units as they are shipped, with the commands of this environment."""
    folder = tmp_path / "units"
    shutil.copytree(UNITS, folder)
    for path in folder.glob("*.service"):
        text = path.read_text()
        assert text.count(INSTALLED) == 1
        path.write_text(text.replace(INSTALLED, f"{Path(sys.executable).parent}/"))
    return folder


def names(folder: Path) -> list[str]:
    found = [path.name for kind in ("service", "timer") for path in folder.glob(f"*.{kind}")]
    assert len(found) == 3
    return found


def test_systemd_finds_no_fault(units: Path) -> None:
    for name in names(units):
        done = analyze(units, "verify", name)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), name
    (units / "rankscope-server.service").write_text("[Service]\nExecStart=/nothing/of/that\n")
    assert analyze(units, "verify", "rankscope-server.service").returncode != 0


@pytest.mark.parametrize("name", ["rankscope-server.service", "rankscope-backup.service"])
def test_little_is_exposed(units: Path, name: str) -> None:
    words = ("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}", name)
    done = analyze(units, *words)
    assert done.returncode == 0, done.stdout
    shutil.rmtree(units / "rankscope-.service.d")
    assert analyze(units, *words).returncode != 0


def test_they_are_installed_by_the_commands_of_the_documents(tmp_path: Path) -> None:
    (tmp_path / "etc" / "systemd" / "system").mkdir(parents=True)
    lines = re.findall(r"(?m)^sudo ((?:install|cp) .+)$", (ROOT / "docs" / "deploy.md").read_text())
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.replace(" /etc/", f" {tmp_path}/etc/"), comments=True)
        subprocess.run(words, cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "etc/rankscope/server.env").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "etc/sysusers.d/rankscope.conf").exists()
    installed = tmp_path / "etc" / "systemd" / "system"
    assert len(names(installed)) == 3
    done = analyze(
        installed, "security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}",
        "rankscope-server.service", "rankscope-backup.service",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_backup_unit_leaves_a_copy(units: Path, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.folder.mkdir()
    server.start()
    try:
        text = (units / "rankscope-backup.service").read_text()
        (line,) = re.findall(r"(?m)^ExecStart=(.+)$", text)
        assert line.count("/var/lib/rankscope-backup") == 1
        words = shlex.split(line.replace("%%", "%").replace("/var/lib/rankscope-backup", "."))
        for _ in range(2):  # a week later it replaces the first one
            subprocess.run(
                words, cwd=tmp_path, check=True, capture_output=True, timeout=60,
                env=os.environ | {"RANKSCOPE_SERVER_DATA_DIR": str(server.folder)},
            )  # fmt: skip
    finally:
        server.close()
    (copy,) = tmp_path.glob("day-[1-7].backup")
    with sqlite3.connect(copy) as database:
        assert database.execute("SELECT count(*) FROM run").fetchone() == (0,)
    database.close()


def test_the_user_of_the_units_is_made(tmp_path: Path) -> None:
    made = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", UNITS / "rankscope.sysusers"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    user = re.search(r"(?m)^User=(.+)$", COMMON.read_text())
    assert user is not None
    assert re.search(rf"user '?{user[1]}'?", made.stdout + made.stderr)


def test_the_variables_of_the_units_are_settings() -> None:
    known = {setting.variable for setting in SETTINGS}
    said = re.findall(
        r"\b(RANKSCOPE_\w+)=", "".join(map(Path.read_text, (*UNITS.glob("*.service"), COMMON)))
    )
    assert set(said) == {"RANKSCOPE_SERVER_DATA_DIR"} <= known


def test_a_stop_is_given_the_time_that_it_takes() -> None:
    (seconds,) = re.findall(
        r"TimeoutStopSec=(\d+)", (UNITS / "rankscope-server.service").read_text()
    )
    assert int(seconds) > 2 * ServerSettings().shutdown_seconds


@cache
def sets_of_calls() -> dict[str, frozenset[str]]:
    """Return the names of system calls and of other sets in each set that systemd knows."""
    said = analyze(UNITS, "syscall-filter").stdout
    parts = re.split(r"(?m)^(?=@)", re.sub(r"\x1b\[[\d;]*m", "", said))
    lines = [part.split("\n") for part in parts if part.startswith("@")]
    return {
        head.strip(): frozenset(line.strip() for line in rest if line[:1].isspace())
        for head, *rest in lines
    }


def calls_of(name: str) -> frozenset[str]:
    """Return all system calls of a set, those of the sets in it too."""
    if not name.startswith("@"):
        return frozenset({name})
    return frozenset().union(*(calls_of(one) for one in sets_of_calls().get(name, ()) if one))


def allowed_calls() -> frozenset[str]:
    """Return the system calls that the units allow, in the order of their lines."""
    allowed: frozenset[str] = frozenset()
    for value in re.findall(r"(?m)^SystemCallFilter=(\S+)$", COMMON.read_text()):
        given = calls_of(value.lstrip("~"))
        allowed = allowed - given if value.startswith("~") else allowed | given
    return allowed


def use(server: ServerProcess) -> None:
    """Send a run to a server, look at it, and end the server in order."""
    server.start()
    try:
        seed_run(server.url, ranks=2, steps=40)
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            for path in ("/", "/api/v1/runs/demo-run", "/api/v1/server", "/metrics"):
                assert client.get(path).status_code == 200
            assert client.post("/api/v1/preflight/runs", json={"num_nodes": 2}).status_code < 300
        server.end(timeout=60)
        assert server.process is not None
        assert server.process.returncode == 0
    finally:
        server.close()


@pytest.mark.needs("strace")
def test_the_server_asks_the_kernel_for_nothing_that_it_is_denied(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    server = ServerProcess(tmp_path)
    server.under = ("strace", "-D", "-f", "-qq", "-o", str(calls))
    use(server)
    asked = set(re.findall(r"(?m)^\d+ +(\w+)\(", calls.read_text()))
    assert {"socket", "openat", "futex"} < asked
    of_root = {"fchown"} if os.geteuid() == 0 else set()  # SQLite's; the units are not root
    assert asked - of_root <= allowed_calls()
    families = set(re.findall(r"\bsocket\((AF_\w+)", calls.read_text()))
    (given,) = re.findall(r"(?m)^RestrictAddressFamilies=(.+)$", COMMON.read_text())
    assert "AF_INET" in families <= set(given.split())


def test_the_server_needs_no_memory_that_is_written_and_run(tmp_path: Path) -> None:
    under = (sys.executable, "-c", DENIED)
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel denies no memory (6.3 and newer do)")
    assert "MemoryDenyWriteExecute=yes" in COMMON.read_text()
    server = ServerProcess(tmp_path)
    server.under = under
    use(server)
