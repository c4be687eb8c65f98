"""Ranks, their collectives and their errors."""
