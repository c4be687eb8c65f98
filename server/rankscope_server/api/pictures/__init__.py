"""What findings look like."""
