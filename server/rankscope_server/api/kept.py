"""What was made of stored rows that rarely change, kept for as long as they are the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The values of the keys that were asked for last, each with the version of its rows."""

    def __init__(self, most: int) -> None:
        """At most so many values are kept."""
        self._most = most
        self._values: OrderedDict[Hashable, tuple[Hashable, T]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, version: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, made anew where its version is another one."""
        with self._lock:
            found = self._values.get(key)
        if found is None or found[0] != version:
            found = version, make()
        with self._lock:
            self._values[key] = found
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        return found[1]
