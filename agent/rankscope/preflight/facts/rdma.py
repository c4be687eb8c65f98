"""InfiniBand and RoCE ports."""

from __future__ import annotations

import msgspec


class RdmaFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """InfiniBand and RoCE ports."""

    ports: tuple[str, ...] = ()
