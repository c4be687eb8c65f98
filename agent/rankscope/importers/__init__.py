"""Readers of what other tools wrote down of a run: each makes the records that an agent sends."""
