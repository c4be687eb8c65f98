"""Known errors as data, and what reads logs by them."""

from __future__ import annotations

from rankscope_server.known_errors.entry import FAMILIES, ROLES, KnownError, Role
from rankscope_server.known_errors.load import (
    EntryFileError,
    KnownErrors,
    known_errors,
    read_entries,
)

__all__ = [
    "FAMILIES",
    "ROLES",
    "EntryFileError",
    "KnownError",
    "KnownErrors",
    "Role",
    "known_errors",
    "read_entries",
]
