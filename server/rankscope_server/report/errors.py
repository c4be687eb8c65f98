"""Why there is no report."""

from __future__ import annotations


class ReportError(Exception):
    """The run cannot be read; the text says what to do."""
