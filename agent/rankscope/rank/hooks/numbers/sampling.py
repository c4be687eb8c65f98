"""What the first batches of each pass over a loader are, as checksums, and what shuffled them.

Ranks that share a model's data should draw other samples each, and each pass other ones first.
Whether they do shows in 32 bits of each of the first batches, made of some of its numbers, and in
the sampler's own epoch; no batch is kept. A pass counts once backward passes follow its batches.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.numbers.batches import tensors_of
from rankscope.rank.steps import DATA

_BATCHES = 4  # of a pass
_MAX_PASSES = 4  # of a loader
_MAX_LOADERS = 8
_MAX_NUMBERS = 1024  # of a tensor that are read
_MAX_TENSORS = 4


@dataclass(slots=True)
class _Pass:
    """One pass over a loader, until its first batches are known."""

    loader: int
    number: int  # 1, 2, 3 ...
    sampler: dict[str, str]
    checksums: list[str] = field(default_factory=list)
    backwards: int = 0


class Sampling:
    """Checksums of the first batches of each pass over a loader, and the epoch of its sampler."""

    name: ClassVar[str] = "sampling"
    needs: ClassVar[str] = "torch.utils.data.dataloader"

    def install(self, context: Context) -> str:
        """Patch where a loader's pass begins; listen to its batches and what is learnt of them."""
        import torch
        from torch.utils.data.dataloader import DataLoader

        self._context, self._is_grad_enabled = context, torch.is_grad_enabled
        self._passes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._num_loaders = 0
        self._pass: _Pass | None = None
        original: Callable[[Any], Any] = DataLoader.__iter__
        begin = guarded(self._begin)

        def __iter__(self: Any) -> Any:
            begin(self)
            return original(self)

        context.patch(DataLoader, "__iter__", __iter__)
        context.listen("batch", self._batch)
        context.listen("backward", self._backward)
        return f"{_BATCHES} batches of the first {_MAX_PASSES} passes over each loader"

    def _begin(self, loader: Any) -> None:
        clock = self._context.clock
        if not clock.is_ours() or clock.phase == DATA:  # the data set of another reads from it
            return
        self._close()
        known = self._passes.get(loader)
        if known is None:
            if self._num_loaders >= _MAX_LOADERS:
                return
            known = self._passes[loader] = [self._num_loaders, 0]
            self._num_loaders += 1
        known[1] += 1
        if known[1] <= _MAX_PASSES:
            self._pass = _Pass(known[0], known[1], sampler_of(loader))

    def _batch(self, item: Any) -> None:
        current = self._pass
        if current is None:
            return
        # one may be fetched ahead; more without a backward pass are looked at, not learnt from
        if not self._is_grad_enabled() or len(current.checksums) >= current.backwards + 2:
            self._pass = None
        elif len(current.checksums) < _BATCHES:
            current.checksums.append(checksum(item))

    def _backward(self, roots: Any) -> None:
        current = self._pass
        if current is not None:
            current.backwards += 1
            if len(current.checksums) == _BATCHES:
                self._close()

    def _close(self) -> None:
        """Record what is known of a pass, if something was learnt from it."""
        current, self._pass = self._pass, None
        if current is None or not current.backwards or not current.checksums:
            return
        self._context.event("data pass", {
            "loader": str(current.loader), "pass": str(current.number),
            "batches": " ".join(current.checksums), "group": self._group(), **current.sampler,
        })  # fmt: skip

    def _group(self) -> str:
        """Return a name for the ranks that share the data of a model, empty where not known."""
        from torch.distributed import get_process_group_ranks

        found = {
            tuple(get_process_group_ranks(model.process_group))
            for model in self._context.replicated
        }
        if len(found) != 1:
            return ""
        ranks = found.pop()
        return f"{len(ranks)} {zlib.crc32(repr(ranks).encode()):08x}"


def sampler_of(loader: Any) -> dict[str, str]:
    """Return what a loader's sampler is, whether it shuffles by epoch, and in which one it is."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            epoch = getattr(sampler, "epoch", None)
            return {
                "sampler": type(sampler).__name__,
                "shuffles": str(bool(getattr(sampler, "shuffle", True))),
                "epoch": f"{epoch} of seed {getattr(sampler, 'seed', '')}"
                if isinstance(epoch, int)
                else "",
            }
    return {"sampler": type(loader.sampler).__name__, "shuffles": "", "epoch": ""}


def checksum(batch: Any) -> str:
    """Return eight digits of some numbers of a batch on the CPU; empty where it has none."""
    import torch

    total = 0
    found = 0
    for tensor in tensors_of(batch):
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
            continue
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            continue
        flat = tensor.detach().view(-1)
        some = flat[:: max(1, -(-len(flat) // _MAX_NUMBERS))].contiguous()
        total = zlib.crc32(bytes(some.view(torch.uint8).tolist()), total)
        found += 1
        if found == _MAX_TENSORS:
            break
    return f"{total:08x}" if found else ""
