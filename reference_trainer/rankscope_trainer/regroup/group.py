"""The default group of one epoch: made of its members, cut where it is broken, left.

gloo closes a connection when its process ends, so the neighbours of a dead rank hear of it at once.
A rank that waits for another neighbour does not, and nothing but its time-out ends that wait. So
one that has given the epoch up says so in the store, where a thread of each rank looks: it shuts
down the sockets that the group has opened, and every wait of the group fails.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # public

_OWN_FILES = Path("/proc/self/fd")
_LOOK_SECONDS = 0.1
_LAST_RETURN_SECONDS = 0.1  # as in `world.leave_world`


class Group:
    """The default process group, one after the other."""

    def __init__(self, store: Store, *, backend: str, timeout_seconds: float) -> None:
        """`timeout_seconds`: of a collective, and of making a group."""
        self._store = store
        self._backend = backend
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._before: dict[int, str] = {}  # sockets that were open before the group
        self._sockets: dict[int, str] = {}
        self._is_left = threading.Event()

    def make(self, number: int, position: int, size: int, is_broken: Callable[[int], bool]) -> None:
        """Join the group of an epoch; all of its members call this.

        `is_broken` is asked from another thread, and so about a store of its own connection.
        """
        self._before = _open_sockets()
        store = PrefixStore(f"group/{number}", self._store)
        # A group that could not be made counts all the same, and its number is a part of the keys.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self._backend, timeout=self._timeout, store=store, rank=position, world_size=size
        )
        self.widen()
        self._is_left = threading.Event()
        threading.Thread(
            target=self._watch,
            args=(number, is_broken, self._is_left),
            name="trainer-regroup",
            daemon=True,
        ).start()

    def widen(self) -> None:
        """Count the sockets that groups within it have opened since, too."""
        self._sockets = {
            number: name
            for number, name in _open_sockets().items()
            if self._before.get(number) != name
        }

    def cut(self) -> None:
        """End every wait of the group, of its threads too."""
        for number, name in self._sockets.items():
            if _name(number) == name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                    end.getpeername()  # raises for gloo's listening socket, which has to stay
                    end.shutdown(socket.SHUT_RDWR)

    def leave(self, *, is_broken: bool) -> None:
        """Leave the group, if one was made."""
        self._is_left.set()
        if is_broken:
            self.cut()
        self._sockets = {}
        time.sleep(_LAST_RETURN_SECONDS)
        if dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(_LAST_RETURN_SECONDS)

    def _watch(
        self, number: int, is_broken: Callable[[int], bool], is_left: threading.Event
    ) -> None:
        while not is_left.wait(_LOOK_SECONDS):
            try:
                if is_broken(number):
                    self.cut()
                    return
            except RuntimeError:  # the store is gone: the rank itself finds out
                return


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because of another rank; gloo has no type for it."""
    return isinstance(error, DistError) or "gloo" in str(error)


def _open_sockets() -> dict[int, str]:
    """Return the sockets of this process, by their descriptors; none where /proc is not there."""
    try:
        numbers = [int(entry) for entry in os.listdir(_OWN_FILES)]
    except OSError:
        return {}
    names = {number: _name(number) for number in numbers}
    return {number: name for number, name in names.items() if name.startswith("socket:")}


def _name(number: int) -> str:
    try:
        return os.readlink(_OWN_FILES / str(number))
    except OSError:
        return ""
