"""GPUs that throttle, fail or are unlike the others."""
