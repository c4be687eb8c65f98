"""Ranks of a group that call different collectives."""

from rankscope_server.diagnose.desync.detector import Desync

__all__ = ["Desync"]
