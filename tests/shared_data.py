"""Where the open data lies that tests read but the project does not hold: beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_DATA = Path(
    os.environ.get("RANKSCOPE_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data")
)


def named(path: Path) -> str:
    """Return how a reason calls a path of the open data: the same on every machine."""
    return f"shared/data/{path.relative_to(SHARED_DATA)}"
