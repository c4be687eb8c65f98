"""Ranks that run on something else than the others."""
