"""A fault from outside: found on PYTHONPATH, it makes one rank's forward sleep after a while."""

import os
import sys
import time

_RANK, _BEGINS_S, _SLEEP_S = (os.environ.get(f"FOREIGN_{n}", "") for n in ("RANK", "AFTER", "S"))


class _AfterImport:
    """Wraps DistributedDataParallel.forward as soon as torch has made it."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find nothing; wait for the module that comes after torch.nn.parallel.distributed."""
        made = sys.modules.get("torch.nn.parallel.distributed")
        model = getattr(made, "DistributedDataParallel", None)
        if model is not None and hasattr(model, "no_sync"):
            sys.meta_path.remove(self)
            _make_slow(model)


def _make_slow(model):  # type: ignore[no-untyped-def]
    original, begins = model.forward, time.monotonic() + float(_BEGINS_S)

    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        if time.monotonic() > begins:
            time.sleep(float(_SLEEP_S))
        return original(self, *args, **kwargs)

    model.forward = forward


if _RANK and os.environ.get("RANK") == _RANK:
    sys.meta_path.insert(0, _AfterImport())
