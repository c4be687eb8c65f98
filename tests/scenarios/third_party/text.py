"""Real text for the programs beside it: Python's own sources, as bytes."""

import random
from pathlib import Path

VOCABULARY = 256  # every byte is a token


def corpus(num_bytes: int = 200_000) -> bytes:
    """Return the sources of the standard library, one after the other."""
    folder = Path(random.__file__).parent
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return text[:num_bytes]
