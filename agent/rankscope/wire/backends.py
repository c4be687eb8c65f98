"""Which backends of process groups leave their collectives to a device."""

_OF_HOST = frozenset({"", "gloo"})
HOST_WAITS_RATIO = 0.01  # of a step, in most steps: such a host waits for other ranks itself


def is_of_device(backend: str) -> bool:
    """Return whether ranks only enqueue the collectives of a backend, for their devices to do."""
    return backend not in _OF_HOST
