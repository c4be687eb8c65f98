"""One process group as a rank records it: its name, its members, its counters."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Group:
    """One process group of this process, and its counters."""

    index: int
    name: str
    ranks: list[int]  # global ranks in group order
    reference: weakref.ref[Any]
    sequence: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    p2p: dict[tuple[int, int], itertools.count[int]] = field(default_factory=dict)

    @property
    def issued(self) -> int:
        """Number of collectives so far."""
        return int(repr(self.sequence)[len("count(") : -1]) - 1  # there is no other way to look

    def continue_after(self, issued: int) -> None:
        """Continue behind so many collectives."""
        self.sequence = itertools.count(issued + 1)

    def next_p2p(self, operation: int, peer: int) -> int:
        """Return the next number between this rank and `peer` in one direction."""
        return next(self.p2p.setdefault((operation, peer), itertools.count(1)))


@dataclass(frozen=True)
class GroupMade:
    """A process group that this rank is about to use for the first time."""

    backend: str
    label: str  # as the recorder names it
    process_group: Any  # not to be kept: that would keep the group alive


def backend_of(process_group: Any) -> str:
    """Return the backend that does a group's work: of several, that of devices, not of the host.

    A group that was made without a name of a backend calls it "undefined", one with several by
    "cpu:gloo,cuda:nccl".
    """
    import torch.distributed as dist

    name = str(dist.get_backend(process_group))
    if name == "undefined":
        name = str(dist.get_backend_config(process_group))
    by_device = dict(part.split(":", 1) for part in name.split(",") if ":" in part)
    if not by_device:
        return name
    devices = [backend for device, backend in by_device.items() if device != "cpu"]
    return devices[0] if devices else by_device["cpu"]
