"""Machines of a run and their samples."""
