"""What one node measures towards the others."""
