"""Advice to controllers: what to do next with a run, as data, and the record of it."""
