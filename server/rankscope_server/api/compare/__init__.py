"""Two runs, attempts or ranges of steps beside each other: what changed."""
