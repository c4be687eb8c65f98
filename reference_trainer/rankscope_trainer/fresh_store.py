"""A store in which nothing is left of an earlier attempt.

torchrun 2.13 keeps one store for all attempts of a run. A restarted rank may read there where
another one listened before it died, and the group does not form
(https://github.com/pytorch/pytorch/issues/135712). So the ranks first agree on a name that no
attempt had before, and keep all that follows under it:

    rank 0   offer = a .................. answered/a/1 = b, so agreed/a/1/b ..> all under a
    rank 1   offer = a, so answered/a/1 = b ................. agreed/a/1/b ...> all under a

No rank is left that would agree for an old offer: a rank that has read one looks again.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public

_PAUSE_SECONDS = 0.02


def fresh_store(store: Store, *, rank: int, world_size: int, timeout_seconds: float) -> Store:
    """Return a part of `store` that only the ranks of this attempt know; all of them call this.

    Raises TimeoutError if they are not all there in time.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        store.set("offer", own)
        for other in range(1, world_size):
            answered = f"answered/{own}/{other}"
            _until(functools.partial(store.check, [answered]), deadline)
            store.set(f"agreed/{own}/{other}/{store.get(answered).decode()}", "")
        return PrefixStore(own, store)

    offer = ""

    def is_agreed() -> bool:
        nonlocal offer
        if not store.check(["offer"]):
            return False
        newest = store.get("offer").decode()
        if newest != offer:
            offer = newest
            store.set(f"answered/{offer}/{rank}", own)
        return bool(store.check([f"agreed/{offer}/{rank}/{own}"]))

    _until(is_agreed, deadline)
    return PrefixStore(offer, store)


def _until(is_true: Callable[[], bool], deadline: float) -> None:
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks of this attempt did not all come to torchrun's store")
        time.sleep(_PAUSE_SECONDS)
