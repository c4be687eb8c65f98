"""Compiles the native probe where no ready-made one fits, once for each PyTorch, into a cache.

Needs a C++ compiler, and the headers that every PyTorch wheel carries. Where one is missing the
probe is skipped with that reason, and a slower source is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankscope.native.binaries import unsupported
from rankscope.native.probe import installed, ready

MODULE = "rankscope_probe"
LIBRARIES = ("-Wl,-z,now", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
TIMEOUT_SECONDS = 600
_LOG_TAIL = 2000  # characters kept of what the compiler said
STANDARDS = ("c++17", "c++20")  # newer versions of PyTorch ask for the second


class BuildError(RuntimeError):
    """The probe cannot be built here; the message says what is missing or what failed."""


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where compiled probes are kept: RANKSCOPE_CACHE, else the user's cache directory.

    Raises BuildError.
    """
    base = environ.get("RANKSCOPE_CACHE")
    if base:
        return Path(base)
    try:
        home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise BuildError("this user has no home directory; set RANKSCOPE_CACHE") from None
    return Path(home) / "rankscope"


def probes_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all compiled probes. Raises BuildError."""
    return cache_directory(environ) / "probe"


def path_of(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the probe for this PyTorch is kept, compiled or not. Raises BuildError.

    The name holds everything that the binary depends on, so that an old one is never loaded.
    """
    name = f"{MODULE}-{ready.sources_digest()[:12]}.so"
    return probes_directory(environ) / _torch().tag / name


def _torch() -> installed.Torch:
    try:
        return installed.torch()
    except installed.NoTorch as error:
        raise BuildError(str(error)) from None


def is_needed(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether none can be loaded yet, ready-made or compiled. Raises BuildError."""
    path = path_of(environ)
    if path.exists():
        return False
    try:
        ready.find(_torch(), environ)
    except ready.Unfit:
        return True
    return _refusal_of(path).exists()


def remember_refusal(reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Note that the ready-made probe fits by its name and yet does not work here; "": it does."""
    with contextlib.suppress(BuildError, OSError):
        note = _refusal_of(path_of(environ))
        if reason:
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.write_text(reason + "\n")
        elif note.exists():
            note.unlink(missing_ok=True)


def _refusal_of(path: Path) -> Path:
    return path.with_suffix(".refused")


def missing() -> str:
    """Return what the machine lacks to build the probe, in words; empty if nothing."""
    if unsupported():
        return unsupported()
    if _compiler() is None:
        return "no C++ compiler (install g++, or set CXX)"
    include = _torch().directory / "include"
    if not (include / "torch" / "library.h").exists():
        return f"no C++ headers in {include}"
    return ""


def remedy() -> str:
    """Return what would bring a probe where none is, as a command; empty if nothing known does."""
    if unsupported():
        return ""
    if _compiler() is None:
        return "install g++ and run `rankscope doctor --build`"
    return "" if missing() or last_failure(path_of()) else "run `rankscope doctor --build`"


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
        if not is_needed(environ) or missing() or last_failure(path_of(environ)):
            return
        subprocess.Popen(
            [sys.executable, "-m", __name__], env=dict(environ), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (BuildError, OSError):
        return  # `rankscope doctor` says why


def _compile(path: Path) -> None:
    said = ""
    for standard in STANDARDS:
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
                made.replace(path)  # at once: no reader sees half a file
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
    torch = _torch()
    return [
        *(_compiler() or ["c++"]), *flags(standard, torch.new_abi, torch.directory / "include"),
        str(ready.SOURCES[0]), "-o", str(output), f"-L{torch.directory / 'lib'}", *LIBRARIES,
    ]  # fmt: skip


def flags(standard: str, new_abi: bool, include: Path) -> list[str]:
    """Return the options of every compiler of the probe, here and for the ready-made ones."""
    return [
        f"-std={standard}", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={new_abi:d}", f"-I{include}",
    ]  # fmt: skip


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
