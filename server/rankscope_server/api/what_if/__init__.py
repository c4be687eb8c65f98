"""What a run would take if it were otherwise: other layouts, links, ranks."""
