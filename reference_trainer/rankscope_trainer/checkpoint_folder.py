"""Which checkpoints a folder holds, and what the newest one says of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def finished(folder: Path) -> list[Path]:
    """Return the checkpoints that are whole, the oldest first."""
    steps = folder.glob("step-*")
    return sorted(path for path in steps if re.fullmatch(r"step-\d{8,}", path.name))


def newest_shape(folder: Path) -> dict[str, Any]:
    """Return what the newest checkpoint in a folder says of its run; nothing without any."""
    checkpoints = finished(folder)
    if not checkpoints:
        return {}
    shape: dict[str, Any] = json.loads((checkpoints[-1] / "checkpoint.json").read_text())["shape"]
    return shape
