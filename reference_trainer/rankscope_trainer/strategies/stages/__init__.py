"""What strategies share whose ranks hold stages of the model: placement, split and schedule."""
