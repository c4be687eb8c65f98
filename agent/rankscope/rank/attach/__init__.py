"""Ways to attach the agent to a process without a change to its script."""
