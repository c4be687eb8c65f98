"""Why there is no copy, or no store of it."""

from __future__ import annotations


class BackupError(Exception):
    """The message says what is wrong, and what to do."""
