"""Everything that touches the database: one writer thread, readers on their own connections."""
