"""Which finding is the cause of which: one cause, one finding."""

from __future__ import annotations

from rankscope.preflight.checking import Run
from rankscope.preflight.model import Finding


def fold(findings: list[Finding], run: Run) -> list[Finding]:
    """Return the causes, worst first, each with what it explains folded under it."""
    return findings
