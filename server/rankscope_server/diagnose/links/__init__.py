"""Slow or lossy links, adapters, hosts and switches."""
