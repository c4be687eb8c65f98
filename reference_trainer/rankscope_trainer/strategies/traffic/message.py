"""One operation of a rank, and counts of them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeAlias

STARTUP = 0  # stands for the time before the first step, where a step is asked for
INT32_BYTES, INT64_BYTES, FLOAT32_BYTES = 4, 8, 4
MIB = 1 << 20


class Message(NamedTuple):
    """One operation of a rank: its name and the bytes that it hands over or receives."""

    operation: str
    num_bytes: int


Traffic: TypeAlias = Counter[Message]  # how often each message occurs
