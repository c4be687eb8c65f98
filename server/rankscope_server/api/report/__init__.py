"""A run on paper."""
