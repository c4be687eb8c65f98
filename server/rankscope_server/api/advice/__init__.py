"""Advice to controllers: what to do next, what was given before, what was done."""
