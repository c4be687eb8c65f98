"""How much memory a rank has left, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.diagnose.window import Window

HOST: tuple[str, ...] = ("rss_bytes", "workers_rss_bytes")


@dataclass(frozen=True, slots=True)
class Room:
    """What is left before memory is full, in bytes, and how that is known."""

    left_bytes: float
    limit_bytes: float
    how: str


def host_room(window: Window, rank: int) -> Room | None:
    """Return what a host has left: the least of its memory and of the rank's control group."""
    machines, host = window.facts.machines, window.host(rank)
    found = []
    available = machines.newest("host", (host, ""), "memory_available_bytes")
    total = machines.newest("host", (host, ""), "memory_total_bytes")
    if available is not None and total is not None:
        found.append(Room(available, total, "memory available on its host"))
    for where, group in machines.devices.get("cgroup", {}):
        used = machines.newest("cgroup", (where, group), "memory_bytes")
        limit = machines.newest("cgroup", (where, group), "memory_limit_bytes")
        if where == host and used is not None and limit is not None and limit > used:
            found.append(Room(limit - used, limit, f"limit of control group {group}"))
    if found:
        return min(found, key=lambda room: room.left_bytes)
    said = window.facts.environments.fact(rank, "host.memory_bytes")
    if not said.isdigit():
        return None
    table = window.facts.memory
    used = sum(
        table.newest(other, name) or 0.0
        for other in table.row_of
        for name in HOST
        if window.host(other) == host
    )
    return Room(int(said) - used, int(said), "memory of its host less that of its ranks")


def device_room(window: Window, rank: int, now: float) -> Room | None:
    """Return what a GPU has left for tensors of this rank; of a part of a GPU it is not known."""
    if window.facts.environments.fact(rank, "env.CUDA_VISIBLE_DEVICES").startswith("MIG-"):
        return None  # samples are of the whole one
    machines, host = window.facts.machines, window.host(rank)
    gpu = machines.gpu_of_rank.get((host, rank))
    known = window.ranks.get(rank)
    number = gpu[1] if gpu else known.local_rank if known else -1
    total = machines.newest("gpu", (host, str(number)), "memory_total_bytes")
    if total is None:
        return None
    used = machines.newest("gpu", (host, str(number)), "memory_used_bytes") or 0.0
    reserved = window.facts.memory.newest(rank, "cuda_reserved_bytes") or now
    others = max(0.0, used - reserved)  # the context and other processes
    return Room(total - others - now, total, "memory of its GPU")
