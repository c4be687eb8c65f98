"""Native binaries of the agent: the probe and the hot path, ready-made or built here."""
