"""The rank that failed first, and those that failed because of it."""

from rankscope_server.diagnose.crash.detector import RootCause

__all__ = ["RootCause"]
