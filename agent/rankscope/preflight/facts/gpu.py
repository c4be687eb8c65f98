"""GPUs as NVML tells them."""

from __future__ import annotations

import msgspec


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GPUs as NVML tells them."""

    num_gpus: int = 0
