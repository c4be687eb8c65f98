"""Steps that wait for data, and batches that are damaged."""
