"""Detectors: pure functions from what is known of an attempt to findings."""
