"""Which checkpoints a folder holds, which is the best, and what the newest says of its run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any


def finished(folder: Path) -> list[Path]:
    """Return the checkpoints that are whole, the oldest first."""
    steps = folder.glob("step-*")
    return sorted(path for path in steps if re.fullmatch(r"step-\d{8,}", path.name))


def best(folder: Path) -> Path | None:
    """Return the checkpoint with the least loss, None where none has one."""
    losses = {path: _document(path).get("loss") for path in finished(folder)}
    known = {path: loss for path, loss in losses.items() if loss is not None}
    return min(
        (path for path, loss in known.items() if not math.isnan(loss)),
        key=known.__getitem__,
        default=None,
    )


def newest_shape(folder: Path) -> dict[str, Any]:
    """Return what the newest checkpoint in a folder says of its run; nothing without any."""
    checkpoints = finished(folder)
    if not checkpoints:
        return {}
    shape: dict[str, Any] = _document(checkpoints[-1])["shape"]
    return shape


def _document(checkpoint: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint / "checkpoint.json").read_text())
    return document
