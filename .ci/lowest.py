#!/usr/bin/env python3
"""Run the quick tests with the lowest version of each dependency that pyproject.toml declares.

    python .ci/lowest.py [VENV]        by default artifacts/lowest, made where it is missing

Tools of the tests and PyTorch are as `make install` has them: older PyTorch is `make versions`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("server", "postgres", "oidc", "traces", "completion")
TORCH = os.environ.get("TORCH", "torch==2.13.0")


def lowest() -> Iterator[str]:
    """Yield each dependency of agent and server at its lowest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in EXTRAS]
    for requirement in (*project["dependencies"], *(row for rows in extras for row in rows)):
        yield re.sub(r">=([\w.]+)[^;]*", r"==\1", requirement)


def main(arguments: list[str]) -> int:
    """Install and run; return the exit code of the tests."""
    venv = Path(arguments[0] if arguments else ROOT / "artifacts" / "lowest")
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH], check=True)
    for wanted in (("-e", f"{ROOT}[dev]"), tuple(lowest())):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return subprocess.run([python, "-m", "tests.run", "quick"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
