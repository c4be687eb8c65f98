"""How long data stays: what there is of each kind, what goes when, and the work of removing it."""
