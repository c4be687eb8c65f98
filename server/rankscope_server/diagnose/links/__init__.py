"""Slow or lossy links, adapters, hosts and switches."""

from rankscope_server.diagnose.links.detector import SlowLink

__all__ = ["SlowLink"]
