"""Log lines, and the search over all runs."""
