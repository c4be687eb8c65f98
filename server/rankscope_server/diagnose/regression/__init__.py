"""Slower than earlier runs of the same job, or than the same run was before."""
