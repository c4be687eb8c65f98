"""Ranks that are slower than their peers."""

from rankscope_server.diagnose.straggler.detector import Straggler

__all__ = ["Straggler"]
