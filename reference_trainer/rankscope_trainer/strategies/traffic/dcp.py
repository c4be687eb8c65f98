"""What a sharded checkpoint sends: plans of who writes or reads what, no weights.

The plans are pickled Python objects whose size is not computed here: `PICKLED_BYTES` stands for
it. Their number, and the sizes that are told before them, are exact.
"""

from __future__ import annotations

from rankscope_trainer.strategies.traffic.message import INT64_BYTES, Message, Traffic

PICKLED_BYTES = -1  # some number of bytes, not the same for each run
NONE_BYTES = 4  # of a pickled None


def dcp_save() -> Traffic:
    """Return one `save`: plans to rank 0 and back, then who wrote what to rank 0, and its word."""
    return _gather() + _scatter() + _gather() + _broadcast()


def dcp_load() -> Traffic:
    """Return one `load`: plans to rank 0 and back, then each tells all that it is done."""
    done = Traffic({Message("all_gather", INT64_BYTES): 1, Message("all_gather", NONE_BYTES): 1})
    return _gather() + _scatter() + done


def _gather() -> Traffic:
    return Traffic({Message("all_gather", INT64_BYTES): 1, Message("gather", PICKLED_BYTES): 1})


def _scatter() -> Traffic:
    sizes = {Message("broadcast", INT64_BYTES): 1, Message("scatter", INT64_BYTES): 1}
    return Traffic({**sizes, Message("scatter", PICKLED_BYTES): 1})


def _broadcast() -> Traffic:
    return Traffic({Message("broadcast", INT64_BYTES): 1, Message("broadcast", PICKLED_BYTES): 1})
