"""The agent of a run: what it reports of itself, and what is asked of it."""
