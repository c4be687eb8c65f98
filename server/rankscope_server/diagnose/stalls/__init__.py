"""Ranks that stall now and then, or whose process is stopped."""
