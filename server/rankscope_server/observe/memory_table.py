"""Memory of each rank over its steps, coarser the longer ago: bounded, whatever a run's length.

Level k keeps one sample for each `WIDTHS[k]` steps, the one of the lowest step, for the newest
`SLOTS` of such stretches. Samples may come in any order and any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

SLOTS = 256
WIDTHS: tuple[int, ...] = (1, 16, 256)
NAMES: tuple[str, ...] = (
    "rss_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_peak_bytes", "pinned_bytes",
    "workers_rss_bytes", "rss_file_bytes", "workers_rss_file_bytes",
)  # fmt: skip
_FIRST_ROWS = 8
Series: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]


class MemoryTable:
    """`series(rank, name)` gives steps and bytes, ascending by step."""

    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}
        self.last: dict[str, NDArray[np.float64]] = {}  # newest value by row
        self.last_step: dict[str, NDArray[np.int64]] = {}
        self._steps: dict[str, NDArray[np.int32]] = {}  # rows x levels x slots, -1 empty
        self._values: dict[str, NDArray[np.float32]] = {}

    def put(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Take the memory of one rank after one step."""
        for name in NAMES:
            value = values.get(name)
            if value is not None and 0 <= value < 1 << 60 and 0 <= step < 1 << 31:
                self._put(rank, step, name, value)

    def _put(self, rank: int, step: int, name: str, value: float) -> None:
        row = self.row_of.setdefault(rank, len(self.row_of))
        self._make_room(name)
        if (step, value) > (int(self.last_step[name][row]), float(self.last[name][row])):
            self.last_step[name][row], self.last[name][row] = step, value
        steps, values = self._steps[name][row], self._values[name][row]
        for level, width in enumerate(WIDTHS):
            stretch = step // width
            slot = stretch % SLOTS
            kept = int(steps[level, slot])
            older, newer = kept // width < stretch, kept // width > stretch
            same = not older and not newer
            if older or (same and (step < kept or (step == kept and value > values[level, slot]))):
                steps[level, slot], values[level, slot] = step, value

    def _make_room(self, name: str) -> None:
        rows = len(self.row_of)
        have = self._steps.get(name)
        if have is not None and len(have) >= rows:
            return
        size = max(_FIRST_ROWS, 1 << (rows - 1).bit_length())
        shape = (size, len(WIDTHS), SLOTS)
        steps, values = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        last, last_step = np.zeros(size), np.full(size, -1, np.int64)
        if have is not None:
            steps[: len(have)], values[: len(have)] = have, self._values[name]
            last[: len(have)], last_step[: len(have)] = self.last[name], self.last_step[name]
        self._steps[name], self._values[name] = steps, values
        self.last[name], self.last_step[name] = last, last_step

    # --- reading -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the kinds of memory of which anything is known."""
        return [name for name in NAMES if name in self._steps]

    def series(self, rank: int, name: str, level: int) -> Series:
        """Return the samples of a rank at one level."""
        row = self.row_of.get(rank)
        cells = self._steps.get(name)
        if row is None or cells is None or row >= len(cells):
            return np.zeros(0, np.int64), np.zeros(0)
        steps = cells[row, level]
        order = np.argsort(steps, kind="stable")
        order = order[steps[order] >= 0]
        return steps[order].astype(np.int64), self._values[name][row, level, order].astype(float)

    def growth(self, name: str, level: int) -> NDArray[np.float64]:
        """Return by how much each row's newest value exceeds the least of a level, in bytes."""
        rows = len(self.row_of)
        steps, values = self._steps[name][:rows, level], self._values[name][:rows, level]
        least = np.where(steps >= 0, values, np.inf).min(axis=1)
        found: NDArray[np.float64] = self.last[name][:rows] - least
        grown = np.zeros(rows)
        grown[: len(found)] = np.where(np.isfinite(found), found, 0.0)
        return grown

    def largest(self, names: Sequence[str]) -> NDArray[np.float64]:
        """Return the largest value of each row that is kept of any of these kinds; 0: of none."""
        rows = len(self.row_of)
        found = np.zeros(rows)
        for name in names:
            if name in self._steps:
                steps, values = self._steps[name][:rows], self._values[name][:rows]
                most = np.where(steps >= 0, values, 0.0).max(axis=(1, 2))
                found[: len(most)] = np.maximum(found[: len(most)], most)
        return found

    def newest_step(self, rank: int, name: str) -> int:
        """Return the step of the newest value of a rank, -1 where there is none."""
        row = self.row_of.get(rank)
        if row is None or name not in self.last_step or row >= len(self.last_step[name]):
            return -1
        return int(self.last_step[name][row])

    def newest(self, rank: int, name: str) -> float | None:
        """Return the newest value of a rank."""
        row = self.row_of.get(rank)
        if row is None or name not in self.last or row >= len(self.last[name]):
            return None
        return float(self.last[name][row]) if self.last_step[name][row] >= 0 else None
