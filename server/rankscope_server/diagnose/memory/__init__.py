"""Memory that grows until it is full, and memory that is never used."""

from rankscope_server.diagnose.memory.detector import MemoryGrowth

__all__ = ["MemoryGrowth"]
