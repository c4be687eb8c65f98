"""Slower than earlier runs of the same job, or than the same run was before."""

from rankscope_server.diagnose.regression.detector import Regression

__all__ = ["Regression"]
