"""The PyTorch that is installed here, as far as a probe depends on it, without importing it."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path


class NoTorch(RuntimeError):
    """There is no PyTorch to make a probe for; the message says what is missing."""


@dataclass(frozen=True)
class Torch:
    """One installed PyTorch and the machine that it runs on."""

    version: str  # whole, for example 2.13.0+cpu
    machine: str  # as `uname -m` says it
    new_abi: bool  # of C++ strings, since GCC 5
    directory: Path = Path()

    @property
    def tag(self) -> str:
        """A name for everything that a probe compiled here depends on, for file names."""
        return f"{self.version}-{self.machine}"


def torch() -> Torch:
    """Return what is installed. Raises NoTorch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise NoTorch("torch is not installed")
    directory = Path(found.origin).parent
    try:
        return Torch(_version(directory), platform.machine(), new_abi(directory), directory)
    except OSError as error:
        raise NoTorch(f"{error.filename}: {error.strerror}") from None


def new_abi(directory: Path) -> bool:
    """Return which C++ ABI torch was built with: old names lack the mark of the new one."""
    library = (directory / "lib" / "libc10.so").read_bytes()
    return b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string" in library


def _version(directory: Path) -> str:
    text = (directory / "version.py").read_text()
    for line in text.splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip("'\"")
    raise NoTorch(f"{directory / 'version.py'} names no version")
