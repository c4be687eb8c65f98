"""The data: the Python standard library's own sources, as bytes.

Every machine that can run the trainer has them. The files are read in sorted order, so every
rank sees the same text, and cut into windows; the order of the windows is shuffled anew in each
epoch, and depends on nothing but the seed.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    get_worker_info,
)

from rankscope_trainer.errors import SettingError

Sample: TypeAlias = tuple[Tensor, Tensor]  # bytes, and for each of them the byte that comes next


def read_standard_library(max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of the sources that Python brings along."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    missing = max_bytes
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if missing <= 0:
            break
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue  # what is installed there differs between machines
        parts.append(path.read_bytes()[:missing])
        missing -= len(parts[-1])
    return b"".join(parts)


def split_text(text: bytes, validation_ratio: float) -> tuple[bytes, bytes]:
    """Return the part to train on and the part, at the end, to validate on."""
    border = len(text) - int(len(text) * validation_ratio)
    return text[:border], text[border:]


class ByteWindows(Dataset[Sample]):
    """Windows of `context` bytes that do not overlap, each with its next bytes."""

    def __init__(
        self, text: bytes, context: int, on_read: Callable[[int], None] = lambda index: None
    ) -> None:
        """Keep the text; `on_read` runs as each window is read."""
        self._text = text
        self._num_bytes = len(text)
        self._context = context
        self._on_read = on_read

    def __len__(self) -> int:
        """Count the windows."""
        return (self._num_bytes - 1) // self._context

    def __getitem__(self, index: int) -> Sample:
        """Cut out one window."""
        self._on_read(index)
        start = index * self._context
        text = bytearray(self.read(start, self._context + 1))
        window = torch.frombuffer(text, dtype=torch.uint8).long()
        return window[:-1], window[1:]

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return a part of the text."""
        return self._text[start : start + num_bytes]


def checksum(inputs_T: Tensor, next_T: Tensor) -> int:
    """Return a number that another window, or one with a flipped bit, does not have."""
    return zlib.crc32(next_T.numpy().tobytes(), zlib.crc32(inputs_T.numpy().tobytes()))


class Slices(Sampler[list[int]]):
    """This shard's part of each slice of an epoch that is still to come.

    PyTorch's `DistributedSampler` deals an epoch's order out like cards, to as many replicas as
    there are shards. It gives all of them equally much: where shards take unequal parts, a shard is
    several of its replicas. A slice has the same number of cards for each replica wherever it
    begins, so the number of replicas may change within an epoch.
    """

    def __init__(self, windows: ByteWindows, sizes: Sequence[int], shard: int, seed: int) -> None:
        """A step takes a slice of `sum(sizes)` windows; `sizes[i]` of them go to shard i."""
        self.slice_size = sum(sizes)
        self.drawn = 0  # windows of this epoch that were drawn before, by all shards
        self.ahead: deque[list[int]] = deque()  # drawn, but not yet handed out as a batch
        self._num_windows = len(windows)
        self._part = math.gcd(*sizes)  # windows of one replica in a slice
        replicas, first = self.slice_size // self._part, sum(sizes[:shard]) // self._part
        self.samplers: list[DistributedSampler[int]] = [
            DistributedSampler(windows, num_replicas=replicas, rank=rank, seed=seed)
            for rank in range(first, first + sizes[shard] // self._part)
        ]
        self.sampler = self.samplers[0]  # where watchers of a DataLoader look for it

    def __len__(self) -> int:
        """Count the slices of a whole epoch; a rest that fills none is dropped."""
        return self._num_windows // self.slice_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other."""
        dealt: dict[int, list[int]] = {}  # by replica
        for drawn in range(self.drawn, self._num_windows - self.slice_size + 1, self.slice_size):
            self.ahead.append([])
            for sampler in self.samplers:
                if sampler.rank not in dealt:
                    dealt[sampler.rank] = list(sampler)
                begin = -(-(drawn - sampler.rank) // sampler.num_replicas)  # drawn before
                self.ahead[-1] += dealt[sampler.rank][begin : begin + self._part]
            yield self.ahead[-1]


class Batches:
    """Batches without end, epoch after epoch; `position` says where in the data they are.

    A step takes the next slice of the epoch's order, and deals it out to the shards:

        order   | step 1      | step 2      | step 3      | ...
        3 ranks | 0 1 2 0 1 2 | 0 1 2 0 1 2 |
        2 ranks                             | 0 1 0 1 0 1 | ...

    `position` counts the windows that all shards together have drawn since the beginning. What
    comes next follows from it alone, so another number of ranks goes on exactly where the former
    ones stopped: no window is left out, none drawn twice.
    """

    def __init__(
        self,
        windows: ByteWindows,
        *,
        batch_size: int | Sequence[int],
        shard: int = 0,
        num_shards: int = 1,
        seed: int = 0,
        on_load: Callable[[], None] = lambda: None,
        on_worker_load: Callable[[], None] = lambda: None,
        num_workers: int = 0,
        checksums: Sequence[int] = (),
    ) -> None:
        """Deal the windows to the shards; `on_load` runs as each batch is loaded.

        A sequence as `batch_size` names that of each shard. With `num_workers` so many processes
        load batches ahead of their use, and `on_worker_load` runs there in place of `on_load`.
        With the `checksums` of all windows `corrupt` can check a batch.
        """
        self._checksums = checksums
        sizes = [batch_size] * num_shards if isinstance(batch_size, int) else batch_size
        self._windows = windows
        self.slices = Slices(windows, sizes, shard, seed)

        def collate(samples: list[Sample]) -> Sample:
            (on_worker_load if get_worker_info() else on_load)()
            inputs, targets = zip(*samples, strict=True)
            return torch.stack(inputs), torch.stack(targets)

        self._loader = DataLoader(
            windows,
            batch_sampler=self.slices,
            collate_fn=collate,
            # Otherwise each epoch takes a number from the generator that dropout uses.
            generator=torch.Generator().manual_seed(seed),
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,  # they inherit the text
            persistent_workers=num_workers > 0,
        )
        self._current: list[int] = []  # the windows of the batch drawn last
        if not len(self._loader):
            raise SettingError(
                "data_bytes",
                f"{len(windows)} windows do not fill a step of {sum(sizes)} on {num_shards} ranks",
                "Read more bytes, or make batch_size or microbatches smaller",
            )
        self.position = 0

    def corrupt(self, batch: Sample) -> list[int]:
        """Return the windows of the batch drawn last that are not what they should be."""
        return [
            index
            for index, inputs_T, next_T in zip(self._current, *batch, strict=False)
            if checksum(inputs_T, next_T) != self._checksums[index]
        ]

    def skip(self) -> Sample:
        """Go on by one batch without loading it; return one of no bytes."""
        left = len(self._windows) - self.position % len(self._windows)
        if left < self.slices.slice_size:
            self.position += left  # the rest of an epoch that fills no slice
        self.position += self.slices.slice_size
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)

    @property
    def num_windows(self) -> int:
        """Count the windows of an epoch, over all shards."""
        return len(self._windows)

    @property
    def windows(self) -> list[int]:
        """The windows of the batch drawn last."""
        return list(self._current)

    @property
    def is_at_epoch_start(self) -> bool:
        """Return whether no batch of this epoch was drawn yet."""
        return self.position % self.num_windows == 0

    def __iter__(self) -> Iterator[Sample]:
        """Yield batches from `position` on."""
        while True:
            epoch, drawn = divmod(self.position, len(self._windows))
            for sampler in self.slices.samplers:
                sampler.set_epoch(epoch)  # without it each epoch has the order of the first
            self.slices.drawn = drawn
            self.slices.ahead.clear()
            for batch in self._loader:
                self.position += self.slices.slice_size
                self._current = self.slices.ahead.popleft()
                yield batch
            self.position = (epoch + 1) * len(self._windows)
