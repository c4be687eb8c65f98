"""Ranks that run on something else than the others."""

from rankscope_server.diagnose.environment.detector import Drift

__all__ = ["Drift"]
