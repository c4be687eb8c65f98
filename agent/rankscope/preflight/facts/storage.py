"""Directories that the job reads and writes."""

from __future__ import annotations

import msgspec


class StorageFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Directories that the job reads and writes."""
