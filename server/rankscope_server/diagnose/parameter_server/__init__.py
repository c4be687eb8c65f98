"""Stale gradients, and servers that all workers wait for."""

from rankscope_server.diagnose.parameter_server.detector import Staleness

__all__ = ["Staleness"]
