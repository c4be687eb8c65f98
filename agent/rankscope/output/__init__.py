"""Lines of output: split, joined to blocks, recognised, limited."""
