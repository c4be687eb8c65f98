"""The environment of programs that are not ours: see .ci/others. Tests need("others")."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

PYTHON = str(Path(__file__).parents[1] / "artifacts" / "others" / "bin" / "python")


def read_tracker(tracker: str, store: str) -> dict[str, Any]:
    """Return the runs of a tracker by their names, as its own reader finds them in its store."""
    reader = Path(__file__).parent / "scenarios" / "tracked_read.py"
    done = subprocess.run(
        [PYTHON, str(reader), tracker, store], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
