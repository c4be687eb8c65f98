"""How the ranks share the work: mesh, groups, pipeline, staleness."""
