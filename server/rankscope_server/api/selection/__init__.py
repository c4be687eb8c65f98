"""Some ranks in some steps: how they deviate, and what they have in common."""
