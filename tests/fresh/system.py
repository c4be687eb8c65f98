"""A bare Debian in a folder, and how a command runs in it as if it were a machine of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fresh import carried
from tests.fresh.rows import TESTING, Row

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankscope" / "fresh"
_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
_STALE = 'Acquire::Check-Valid-Until "false"'  # a mirror of a testing release may lag for weeks
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CannotBuild(Exception):
    """No bare system can be made here; the message says why."""


def archive(debian: str, packages: Sequence[str]) -> Path:
    """Return a packed system with some packages, made at the first call (about a minute)."""
    names = ",".join(packages)
    digest = hashlib.sha256(names.encode()).hexdigest()[:8]
    target = CACHE / f"{debian}-{platform.machine()}-{digest}.tar"
    if target.exists():
        return target
    if shutil.which("mmdebstrap") is None:
        _call(["apt-get", "update", "-qq"])
        _call(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap"])
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder) / target.name
        words = ["--quiet", "--variant=apt", f"--include={names}"]
        words += [f"--aptopt={_STALE}"] if debian == TESTING else []
        _call(["mmdebstrap", *words, debian, str(made), *_sources(debian, Path(folder))])
        made.rename(target)
    return target


def _sources(debian: str, folder: Path) -> list[str]:
    """Return where packages come from: this machine's sources, told of another release."""
    own = platform.freedesktop_os_release()
    if own.get("ID") != "debian" or not _SOURCES.exists():
        return []  # mmdebstrap's own
    text = _SOURCES.read_text().replace(own["VERSION_CODENAME"], debian)
    path = folder / "debian.sources"
    path.write_text(text)
    return [str(path)]


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise CannotBuild(f"command not found: {command[0]}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise CannotBuild(f"{shlex.join(command)} ended with {done.returncode}: {' '.join(said)}")


@contextlib.contextmanager
def unpacked(row: Row, checkout: Path) -> Iterator[System]:
    """Unpack the system of a row beside a bare clone of HEAD, and delete it at the end."""
    packed = archive(row.debian, row.packages)
    folder = Path(tempfile.mkdtemp(prefix="rankscope-fresh.", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        _call(["tar", "--extract", f"--file={packed}", f"--directory={folder}", "--numeric-owner"])
        carried.copy_into(folder)
        clone = ["git", "clone", "--quiet", "--bare", "--no-hardlinks", str(checkout)]
        _call([*clone, str(folder / "src.git")])
        _call(["git", "config", "--file", str(folder / "etc/gitconfig"), "safe.directory", "*"])
        shutil.copy(HERE / "inside.sh", folder / "inside.sh")
        yield System(row, folder)
    finally:
        _call(["rm", "-rf", "--one-file-system", str(folder)])


class System:
    """A bare system that can run commands."""

    def __init__(self, row: Row, folder: Path) -> None:
        self._row, self._folder = row, folder

    def run(self, command: str, log: Path, limit_s: float, *, online: bool = False) -> int:
        """Run one line of a shell as the row's user; return its exit code, 124 after the limit.

        `online` leaves the network of a row without IPv6 as the machine's, for pip.
        """
        row = self._row
        shm = str(row.shm_mib or "")
        outside = ["sh", str(HERE / "enter.sh"), str(self._folder), row.tun, shm]
        flags = [_yes(row.home), _yes(row.namespaces), _yes(row.ipv6 or online), _yes(row.ascii)]
        inside = ["sh", "/inside.sh", row.user, *flags, command]
        namespaces = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*namespaces, *outside, *inside], stdout=file, stderr=file, env=self._environ(),
                stdin=subprocess.PIPE,
            )  # fmt: skip
            try:
                shown = "".join(f"{folder}\n" for folder in carried.folders())
                process.communicate(shown.encode(), timeout=limit_s)
            except BaseException as error:
                process.kill()  # and with it all that runs there
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return 124
        return process.returncode

    def _environ(self) -> dict[str, str]:
        words = {"LANG": "C.UTF-8", "TERM": "xterm"}
        if self._row.ascii:
            words = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
        return {"PATH": _PATH, **words, **carried.variables()}


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
