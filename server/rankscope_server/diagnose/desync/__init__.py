"""Ranks of a group that call different collectives."""
