"""Idle time of pipelines and uneven stages."""
