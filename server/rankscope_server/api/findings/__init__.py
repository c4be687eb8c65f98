"""Findings of a run, their history, and its verdict."""
