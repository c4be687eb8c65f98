"""One step of all ranks on one clock: its timeline, why it took so long, and its trace."""
