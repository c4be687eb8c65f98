"""Versions, fingerprints of script and data."""

from __future__ import annotations

import msgspec


class SoftwareFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Versions, fingerprints of script and data."""

    has_torch: bool = False
