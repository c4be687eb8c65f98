"""Where the time of a run went."""

from rankscope_server.diagnose.goodput.detector import Goodput

__all__ = ["Goodput"]
