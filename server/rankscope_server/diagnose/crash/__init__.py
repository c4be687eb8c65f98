"""The rank that failed first, those that failed because of it, and those that were outlived."""

from rankscope_server.diagnose.crash.detector import RootCause
from rankscope_server.diagnose.crash.regrouping import Regrouping

__all__ = ["Regrouping", "RootCause"]
