"""Preflight over HTTP."""
