"""What waits in a spool."""

from __future__ import annotations

from pathlib import Path


def spooled(run: Path) -> list[Path]:
    return sorted((run / "node" / "spool").glob("*.batch"))
