"""Ranks come and go while the others train on; `training.py` begins with a drawing of it."""
