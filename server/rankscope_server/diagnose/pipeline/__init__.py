"""Idle time of pipelines and uneven stages."""

from rankscope_server.diagnose.pipeline.detector import Pipeline

__all__ = ["Pipeline"]
