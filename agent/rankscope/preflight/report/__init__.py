"""The verdict for people and for scripts."""
