"""Memory, utilisation and numbers of training over all ranks: bands of peers, the worst pinned."""
