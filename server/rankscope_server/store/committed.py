"""What a writer has written lately, as it is in the store: it is not read again to be changed.

Only where no other process writes beside it. A transaction takes out what it changes and puts it
back once it is committed: of one that fails nothing is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

# A key begins with the run.
K = TypeVar("K", bound=tuple[Any, ...])
V = TypeVar("V")


class Committed(Generic[K, V]):
    """The newest values of one kind, in bounded memory."""

    def __init__(self, bytes_of: Callable[[V], int], most_bytes: int) -> None:
        self._bytes_of, self._most_bytes = bytes_of, most_bytes
        self._values: OrderedDict[K, V] = OrderedDict()
        self._num_bytes = 0

    def take(self, key: K) -> V | None:
        """Return a value and forget it; None where it is not known."""
        found = self._values.pop(key, None)
        if found is not None:
            self._num_bytes -= self._bytes_of(found)
        return found

    def put(self, values: Mapping[K, V]) -> None:
        """Keep values that were committed; of too many the oldest go."""
        for key, value in values.items():
            self.take(key)
            self._values[key] = value
            self._num_bytes += self._bytes_of(value)
        while self._num_bytes > self._most_bytes:
            self.take(next(iter(self._values)))

    def forget(self, run_id: str) -> None:
        """Forget what is of a run that is deleted."""
        for key in [key for key in self._values if key[0] == run_id]:
            self.take(key)
