"""Memory that grows until it is full."""
