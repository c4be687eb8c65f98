"""A libnvidia-ml.so.1 with known answers: `fake_nvml.c`, compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import capabilities

SOURCE = Path(__file__).with_suffix(".c")


def build(directory: Path) -> Path:
    """Return `directory`, to be put on LD_LIBRARY_PATH, with the library in it."""
    capabilities.need("compiler")
    target = directory / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(SOURCE)], check=True)
    return directory
