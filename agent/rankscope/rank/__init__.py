"""Inside the training process: hooks, recorder, steps, numbers."""
