"""The words that all parts of the simulator share: an item, and when a job began."""

from __future__ import annotations

from typing import TypeAlias

from rankscope.wire import schema
from rankscope.wire.chunk import Column

START_NS = 1_790_000_000_000_000_000
MS = 1_000_000
Item: TypeAlias = tuple[int, schema.AnyRecord | tuple[schema.Chunk, dict[str, Column]]]
