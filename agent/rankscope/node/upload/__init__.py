"""From what was read to batches that the server has stored."""
