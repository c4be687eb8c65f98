"""Older versions of Rankscope out of the history of this clone, to run beside the one of now."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "server", "reference_trainer")


def extract(commit: str, folder: Path) -> dict[str, str]:
    """Put a version into a folder; return the variables with which Python imports it.

    Skips the test where the history is not there: in a tarball, or a shallow clone.
    """
    there = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if there.returncode:
        pytest.skip(f"the history of this clone does not reach back to {commit}")
    folder.mkdir()
    packed = subprocess.run(
        ["git", "archive", commit, *PACKAGES, "web"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    own = os.pathsep.join(str(folder / name) for name in PACKAGES)
    return {"PYTHONPATH": own, "PYTHONWARNINGS": "default"}
