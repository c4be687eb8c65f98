"""Searches and views that are kept under a name."""
