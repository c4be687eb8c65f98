"""Compiles the native probe once for each pair of PyTorch and Python, and keeps it in a cache.

Needs a C++ compiler, Python's headers and those that every PyTorch wheel carries. Where one is
missing the probe is skipped with that reason, and a slower source is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("probe.cpp")
MODULE = "rankscope_probe"
TIMEOUT_SECONDS = 600
_LOG_TAIL = 2000  # characters kept of what the compiler said
_STANDARDS = ("c++17", "c++20")  # newer versions of PyTorch ask for the second


class BuildError(RuntimeError):
    """The probe cannot be built here; the message says what is missing or what failed."""


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where compiled probes lie: RANKSCOPE_CACHE, else the user's cache directory."""
    base = environ.get("RANKSCOPE_CACHE")
    if base:
        return Path(base)
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "rankscope"


def torch_directory() -> Path:
    """Return the directory of the installed torch, without importing it. Raises BuildError."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed")
    return Path(found.origin).parent


def torch_version(torch: Path) -> str:
    """Return the full version with its build, for example 2.13.0+cpu."""
    text = (torch / "version.py").read_text()
    for line in text.splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip("'\"")
    raise BuildError(f"{torch / 'version.py'} names no version")


def path_of(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the probe for this PyTorch and Python lies, or would lie. Raises BuildError.

    The name holds everything that the binary depends on, so that an old one is never loaded.
    """
    torch = torch_directory()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    tag = f"{torch_version(torch)}-{sysconfig.get_config_var('SOABI')}-{platform.machine()}"
    return cache_directory(environ) / "probe" / tag / f"{MODULE}-{digest}.so"


def missing() -> str:
    """Return what the machine lacks to build the probe, in words; empty if nothing."""
    if platform.system() != "Linux":
        return f"built on Linux only, this is {platform.system()}"
    if _compiler() is None:
        return "no C++ compiler (install g++, or set CXX)"
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        return f"no Python headers in {include} (install python3-dev)"
    torch = torch_directory()
    if not (torch / "include" / "torch" / "library.h").exists():
        return f"no C++ headers in {torch / 'include'}"
    return ""


def build(environ: Mapping[str, str] = os.environ) -> Path:
    """Compile the probe unless it is there, and return its path. Takes about 20 s of one core.

    Several processes may ask at once: one compiles, the others wait. Raises BuildError.
    """
    path = path_of(environ)
    if path.exists():
        return path
    lack = missing()
    if lack:
        raise BuildError(lack)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():
                _compile(path)
    except OSError as error:
        raise BuildError(f"{path.parent}: {error.strerror}; set RANKSCOPE_CACHE") from error
    return path


def build_in_background(environ: Mapping[str, str] = os.environ) -> None:
    """Compile it for the runs to come, in a process of its own that yields to everything else."""
    try:
        path = path_of(environ)
        if path.exists() or missing() or last_failure(path):
            return
        subprocess.Popen(
            [sys.executable, "-m", __name__], env=dict(environ), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (BuildError, OSError):
        return  # `rankscope doctor` tells why


def _compile(path: Path) -> None:
    said = ""
    for standard in _STANDARDS:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            try:
                done = subprocess.run(
                    _command(made, standard), capture_output=True, text=True, check=False,
                    timeout=TIMEOUT_SECONDS,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise BuildError(f"the compiler took more than {TIMEOUT_SECONDS} s") from None
            if done.returncode == 0:
                made.chmod(0o755)
                made.replace(path)  # at once: nobody sees half a file
                _log_of(path).unlink(missing_ok=True)
                return
            said = done.stderr
    _log_of(path).write_text(said)
    raise BuildError(last_failure(path))


def _log_of(path: Path) -> Path:
    return path.with_suffix(".log")


def last_failure(path: Path) -> str:
    """Return in one line why an earlier build of this very probe failed; empty if none did."""
    try:
        said = _log_of(path).read_text(errors="replace")
    except OSError:
        return ""
    first = next((line for line in said.splitlines() if "error" in line), said[-_LOG_TAIL:])
    return f"the compiler failed: {first.strip()} (all of it: {_log_of(path)})"


def is_trusted(path: Path) -> bool:
    """Return whether only this user or root can have written the file: it will be loaded."""
    facts = path.stat()
    return facts.st_uid in (0, os.getuid()) and not facts.st_mode & 0o022


def _command(output: Path, standard: str) -> list[str]:
    torch = torch_directory()
    return [
        *(_compiler() or ["c++"]), f"-std={standard}", "-O2", "-fPIC", "-shared",
        "-fvisibility=hidden", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={_new_abi(torch):d}",
        f"-I{torch / 'include'}", f"-I{sysconfig.get_paths()['include']}",
        str(SOURCE), "-o", str(output), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _new_abi(torch: Path) -> bool:
    """Return which C++ ABI torch was built with: old names lack the mark of the new one."""
    library = (torch / "lib" / "libc10.so").read_bytes()
    return b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string" in library


def _compiler() -> list[str] | None:
    asked = os.environ.get("CXX")
    if asked:
        return asked.split()
    found = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    return None if found is None else [found]


def main() -> int:
    """Build at the lowest priority; for `build_in_background`."""
    os.nice(19)
    with contextlib.suppress(OSError):  # nice counts within a session only, where sessions share
        Path("/proc/self/autogroup").write_text("19")
    try:
        build()
    except BuildError:
        return 1
    return 0


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
