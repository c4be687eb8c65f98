"""Clocks of hosts and processes that are apart."""

from rankscope_server.diagnose.clocks.detector import ClockOffsets

__all__ = ["ClockOffsets"]
