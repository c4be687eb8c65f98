"""Memory that grows until it is full."""

from rankscope_server.diagnose.memory.detector import MemoryGrowth

__all__ = ["MemoryGrowth"]
