"""Rankscope: watch, explain and search a distributed PyTorch run."""

__version__ = "0.1.0"
