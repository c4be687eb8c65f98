"""The collective smoke test: torch in a child process of its own."""
