"""The data: the Python standard library's own sources, as bytes.

Every machine that can run the trainer has them. The files are read in sorted order, so every
rank sees the same text, and cut into windows; the order of the windows is shuffled anew in each
epoch, and depends on nothing but the seed.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

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

    def __init__(self, text: bytes, context: int) -> None:
        """Keep the text as one tensor."""
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        """Count the windows."""
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> Sample:
        """Cut out one window."""
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]


class ResumableSampler(DistributedSampler[int]):
    """Torch's `DistributedSampler`, able to begin in the middle of an epoch."""

    skip = 0  # indices of this epoch that were drawn before

    def __iter__(self) -> Iterator[int]:
        """Yield this shard's indices that are still to come."""
        indices = list(super().__iter__())
        return iter(indices[self.skip :])


class Batches:
    """Batches without end, epoch after epoch; `position` says where in the data it stands."""

    def __init__(
        self,
        windows: ByteWindows,
        *,
        batch_size: int,
        shard: int = 0,
        num_shards: int = 1,
        seed: int = 0,
        on_load: Callable[[], None] = lambda: None,
    ) -> None:
        """Deal the windows to `num_shards` shards; `on_load` runs as each batch is loaded."""
        self._sampler = ResumableSampler(
            windows, num_replicas=num_shards, rank=shard, seed=seed, shuffle=True, drop_last=True
        )

        def collate(samples: list[Sample]) -> Sample:
            on_load()
            inputs, targets = zip(*samples, strict=True)
            return torch.stack(inputs), torch.stack(targets)

        self._batch_size = batch_size
        self._loader = DataLoader(
            windows,
            batch_size=batch_size,
            sampler=self._sampler,
            collate_fn=collate,
            drop_last=True,
            # Otherwise each epoch takes a number from the generator that dropout uses.
            generator=torch.Generator().manual_seed(seed),
        )
        if not len(self._loader):
            raise SettingError(
                "data_bytes",
                f"{len(windows)} windows do not fill a batch of {batch_size}"
                f" on each of {num_shards} ranks",
                "Read more bytes, or make batch_size or microbatches smaller",
            )
        self.position = 0  # batches drawn since the beginning of training

    def __iter__(self) -> Iterator[Sample]:
        """Yield batches from `position` on."""
        while True:
            epoch, drawn = divmod(self.position, len(self._loader))
            self._sampler.set_epoch(epoch)
            self._sampler.skip = drawn * self._batch_size
            for batch in self._loader:
                self.position += 1
                yield batch
