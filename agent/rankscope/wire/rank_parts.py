"""The events of several ranks in one chunk: where each rank's begin, and which of the first rank's
events each one is the counterpart of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the events of each rank begin, and how many they are."""

    begins: Array
    counts: Array

    def each(self, per_part: Array) -> Array:
        """Return, for each event, the value of its part."""
        found: Array = per_part if len(per_part) == 1 else np.repeat(per_part, self.counts)
        return found

    def shifts(self, keys: Array) -> Array:
        """Return how many events after its own place each rank's counterparts in the first are.

        Ranks that do the same rarely begin a chunk with the same call. `keys` say what is the
        same; a rank that has no key in common with the first is taken to begin with it.
        """
        first = keys[: self.counts[0]]
        order = np.argsort(first, kind="stable")
        at = np.minimum(np.searchsorted(first[order], keys), len(first) - 1)
        places = order[at]
        is_met = np.flatnonzero(first[places] == keys)
        found = np.zeros(len(self.begins), np.int64)
        parts, firsts = np.unique(
            np.searchsorted(self.begins, is_met, side="right") - 1, return_index=True
        )
        met = is_met[firsts]
        found[parts] = places[met] - (met - self.begins[parts])
        return found

    def counterparts(self, shifts: Array, first: Array) -> tuple[Array, Array]:
        """Return the events of all ranks but the first, and for each the place of its counterpart.

        `first` is for each part the number of the part that is the first of its chunk. Where a rank
        has calls that the first has not, the first's nearest call is taken.
        """
        is_other = first != np.arange(len(first))
        others = np.flatnonzero(self.each(is_other))
        of_first = self.each(self.begins[first])[others]
        last = self.each(self.counts[first] - 1)[others]
        places = others - self.each(self.begins)[others] + self.each(shifts)[others]
        return others, of_first + np.clip(places, 0, last)
