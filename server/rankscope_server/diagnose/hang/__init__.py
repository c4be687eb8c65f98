"""Jobs that do not move: which rank is missing, and which only wait."""

from rankscope_server.diagnose.hang.detector import Hang

__all__ = ["Hang"]
