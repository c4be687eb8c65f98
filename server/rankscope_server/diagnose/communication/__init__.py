"""How much of a step communication takes, and what would make it less."""
