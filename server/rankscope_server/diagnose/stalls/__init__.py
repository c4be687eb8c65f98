"""Ranks that stall now and then, or whose process is stopped."""

from rankscope_server.diagnose.stalls.detector import Stalls
from rankscope_server.diagnose.stalls.stopped_process import StoppedProcess

__all__ = ["Stalls", "StoppedProcess"]
