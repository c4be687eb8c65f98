"""What a rank leaves on the disk of its node: run directory, rings, journal, commands."""
