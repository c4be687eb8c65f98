"""Ranks come and go while the others train on; `training.py` begins with a drawing of it."""

NUM_PLACES = "RANKSCOPE_TRAINER_PLACES"  # variable: how many ranks the whole job has
