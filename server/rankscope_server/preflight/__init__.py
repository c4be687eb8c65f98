"""Preflight in the server: the hub of agents that cannot reach each other, and what is kept."""
