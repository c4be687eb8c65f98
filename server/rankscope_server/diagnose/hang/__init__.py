"""Jobs that do not move: which rank is missing, and which only wait."""
