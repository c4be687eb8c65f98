"""What one node knows of itself: data only, no verdicts."""
