"""What is stored, how long it stays, and its deletion."""
