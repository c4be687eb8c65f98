"""Which backends of process groups leave their collectives to a device."""

_OF_HOST = frozenset({"", "gloo"})


def is_of_device(backend: str) -> bool:
    """Return whether ranks only enqueue the collectives of a backend, for their devices to do."""
    return backend not in _OF_HOST
