"""The data phase: waiting for batches, what kind of loader gives them, and loops that only look.

A loop over a loader in which no backward pass follows its batches is an evaluation. That shows
only when the next batch is asked for, so its time is counted over then. One batch may be fetched
ahead (Accelerate does), which is why a single batch without a backward pass says nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.phases.optimizer import take_compiled
from rankscope.rank.steps import DATA, EVALUATION, FORWARD, OTHER, Mark
from rankscope.wire import schema

_A_FORWARD_NS = 100_000  # who computes less with a batch only throws it away
_MAX_LOADERS = 16  # different ones that are described


class DataLoading:
    """Time in which a step waits for its batch (torch.utils.data.DataLoader), and its loaders."""

    name: ClassVar[str] = "data"
    needs: ClassVar[str] = "torch.utils.data.dataloader"

    def install(self, context: Context) -> str:
        """Patch `__next__` of the iterator on its class, and where the loader makes it.

        Not the iterator's `__init__`: torch warns there of who called it, and that would be us.
        """
        from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

        original: Any = _BaseDataLoaderIter.__next__
        original_make: Any = DataLoader._get_iterator
        waits = _Waits(context)
        loaders = _Loaders(context)

        def __next__(self: Any) -> Any:
            before = waits.begin(self)
            try:
                item = original(self)
            except BaseException as error:  # also StopIteration: no batch came
                if before is not None:
                    waits.end_without(self, before, error)
                raise
            if before is not None:
                waits.end(before, item)
            return item

        def _get_iterator(self: Any) -> Any:
            iterator = original_make(self)
            loaders.describe(self)
            return iterator

        context.patch(_BaseDataLoaderIter, "__next__", __next__)
        context.patch(DataLoader, "_get_iterator", _get_iterator)
        return "DataLoader iterators"


class _Waits:
    """Times the waits of all iterators; each iterator carries where its unused batches began."""

    def __init__(self, context: Context) -> None:
        import torch

        self._context = context
        self._is_grad_enabled = torch.is_grad_enabled

    @guarded
    def begin(self, iterator: Any) -> int | None:
        """A batch is asked for; return the phase before."""
        clock = self._context.clock
        if not clock.is_ours():
            return None
        if clock.phase == DATA:  # the data set of one loader reads from another
            return DATA
        if self._context.cycle.compiled:
            take_compiled(self._context)
        if clock.skipped:
            clock.optimizer_skipped(schema.STEP_SKIPPED)
            self._context.step_boundary()
        clock.sees_data = True
        mark: Mark | None = getattr(iterator, "_rankscope_mark", None)
        if mark is not None and mark.num_backwards == clock.num_backwards:
            iterator._rankscope_unused += 1
            if iterator._rankscope_unused >= 2:
                clock.was_evaluation(mark, _A_FORWARD_NS)
        else:
            mark = None
        if mark is None or mark.step != clock.step:
            iterator._rankscope_mark = clock.mark()
            iterator._rankscope_unused = 0
        return clock.enter(DATA)

    @guarded
    def end(self, before: int, item: Any) -> None:
        """The batch is there."""
        if before == DATA:
            return
        self._context.clock.enter(FORWARD if self._is_grad_enabled() else EVALUATION)
        for listener in self._context.events.batch:
            listener(item)

    @guarded
    def end_without(self, iterator: Any, before: int, error: BaseException) -> None:
        """No batch came, so no forward follows."""
        if before == DATA:
            return
        clock = self._context.clock
        clock.enter(OTHER)
        if isinstance(error, StopIteration):
            mark: Mark | None = getattr(iterator, "_rankscope_mark", None)
            # Where none was handed out since the mark, the time is that of this hook alone.
            if mark is not None and iterator._rankscope_unused:
                clock.was_evaluation(mark, _A_FORWARD_NS)


class _Loaders:
    """Describes each loader once: what decides how long a step waits for it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: list[dict[str, str]] = []

    @guarded
    def describe(self, loader: Any) -> None:
        """Record the facts of a loader as an event, if they are new."""
        if len(self._seen) >= _MAX_LOADERS or not self._context.clock.is_ours():
            return
        size = loader.batch_size
        if size is None and loader.batch_sampler is not None:
            size = getattr(loader.batch_sampler, "batch_size", None)
        facts = {
            "dataset": type(loader.dataset).__name__,
            "iterable": str(loader._dataset_kind != 0),
            "num_workers": str(loader.num_workers),
            "prefetch_factor": str(loader.prefetch_factor or 0),
            "batch_size": "unknown" if size is None else str(size),
            "pin_memory": str(bool(loader.pin_memory)),
            "persistent_workers": str(bool(loader.persistent_workers)),
            "drop_last": str(bool(loader.drop_last)),
        }
        if facts not in self._seen:
            self._seen.append(facts)
            self._context.on_recorder(lambda context: context.event(schema.DATA_LOADER, facts))
        if not self._context.data_facts:
            self._context.data_facts = {"dataset.type": facts["dataset"]}
            if _has_been_counted(loader):
                self._context.data_facts["dataset.length"] = str(len(loader.dataset))


def _has_been_counted(loader: Any) -> bool:
    """Return whether the sampler has asked the data set for its length: then we may, too."""
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    counting = (RandomSampler, SequentialSampler, DistributedSampler)
    return loader._dataset_kind == 0 and isinstance(loader.sampler, counting)
