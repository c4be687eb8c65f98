"""What a recorded run would take if it were laid out otherwise: the planner, calibrated by the run.

Pure, and apart from `replay/`: a replay runs recorded steps again and knows no model, this knows
what a layout sends and holds and runs nothing.
"""
