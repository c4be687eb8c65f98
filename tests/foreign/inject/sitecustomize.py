"""A fault from outside: found on PYTHONPATH, it makes one rank sleep after a while.

In each pass forward of the outermost module, or (FOREIGN_PLACE=data) in each batch of a loader, or
(item) wherever its script reads a number by .item(), as one that must wait for its device; with
FOREIGN_PLACE=thread a second thread of that rank computes in Python from then on.
"""

import os
import sys
import threading
import time

_RANK, _AT_S, _SLEEP_S, _PLACE = (
    os.environ.get(f"FOREIGN_{name}", "") for name in ("RANK", "AT", "S", "PLACE")
)


class _AfterImport:
    """Plants the fault as soon as torch has been imported so far."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find nothing; wait for the module that comes after the one that is changed."""
        if _PLACE == "data":
            made = sys.modules.get("torch.utils.data.dataloader")
            if hasattr(made, "_MultiProcessingDataLoaderIter"):
                sys.meta_path.remove(self)
                _slow_batches(made._BaseDataLoaderIter)
        elif hasattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel"):
            sys.meta_path.remove(self)
            {"thread": _burn_beside, "item": _slow_items}.get(_PLACE, _slow_passes)()


def _beside():  # type: ignore[no-untyped-def]
    while not _is_late():
        time.sleep(0.5)
    _burn()


def _burn():  # type: ignore[no-untyped-def]
    while True:
        sum(range(10_000))


def _is_late():  # type: ignore[no-untyped-def]
    """Return whether this is the rank, and the time has come."""
    dist = sys.modules["torch"].distributed
    return (
        time.monotonic() > float(_AT_S) and dist.is_initialized() and dist.get_rank() == int(_RANK)
    )


def _burn_beside():  # type: ignore[no-untyped-def]
    threading.Thread(target=_beside, daemon=True).start()


def _slow_batches(loader):  # type: ignore[no-untyped-def]
    original = loader.__next__

    def following(self):  # type: ignore[no-untyped-def]
        if _is_late():
            time.sleep(float(_SLEEP_S))
        return original(self)

    loader.__next__ = following


def _slow_items():  # type: ignore[no-untyped-def]
    tensor = sys.modules["torch"].Tensor
    original = tensor.item

    def item(self):  # type: ignore[no-untyped-def]
        is_of_torch = "/torch/" in sys._getframe(1).f_code.co_filename
        if not is_of_torch and _is_late():
            time.sleep(float(_SLEEP_S))
        return original(self)

    tensor.item = item


def _slow_passes():  # type: ignore[no-untyped-def]
    from torch.nn.modules.module import register_module_forward_pre_hook

    outermost = []

    def before(module, _):  # type: ignore[no-untyped-def]
        if module.training and not outermost:
            outermost.append(module)
        if outermost and module is outermost[0] and _is_late():
            time.sleep(float(_SLEEP_S))

    register_module_forward_pre_hook(before)


if _RANK:
    sys.meta_path.insert(0, _AfterImport())
