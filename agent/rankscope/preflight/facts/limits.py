"""Limits and memory of this process and its cgroup."""

from __future__ import annotations

import msgspec


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits and memory of this process and its cgroup."""
