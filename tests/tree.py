"""A name for the state of the code that results belong to."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is no part of what is tried: words about it, and results.
_UNTRIED = ("docs/", "benchmarks/results/", "CHANGELOG.md", "tests/all.json", "tests/seconds.json")


def tree() -> str:
    """Return a name of all that is committed and tried."""
    command = ["git", "ls-tree", "-r", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    kept = [line for line in lines if not line.partition("\t")[2].startswith(_UNTRIED)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]
