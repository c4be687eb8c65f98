"""Stale gradients, and servers that all workers wait for."""
