"""Runs: list, overview, findings, environment."""
