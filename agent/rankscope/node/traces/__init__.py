"""Traces of torch.profiler on their way to the server."""
