"""GPU memory that no rank of a job ever uses: advice, and no fault."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.diagnose.memory.room import device_room
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Level
from rankscope_server.findings.text import bytes_text, percent_text

_HELD, _PEAK = "cuda_reserved_bytes", "cuda_peak_bytes"


@dataclass(frozen=True, slots=True)
class _Use:
    """The most that one rank's allocator ever held, and what its GPU then has in use, in bytes."""

    rank: int
    held_bytes: float
    used_bytes: float
    limit_bytes: float

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes


def unused(window: Window) -> list[Finding]:
    """Return the advice for a job of which every rank leaves most of its GPU's memory unused."""
    fullest = _fullest(window)
    if fullest is None or fullest.share > window.policy.unused_memory_share:
        return []
    steps = _num_steps(window)
    used, limit = bytes_text(fullest.used_bytes), bytes_text(fullest.limit_bytes)
    count = len(window.ranks)
    where = f"each of {count:,} ranks" if count > 1 else "its rank"
    return [
        window.finding(
            "unused_memory",
            "unused",
            ranks=sorted(window.ranks),
            what=f"At most {used} of {limit} of GPU memory are in use on {where}",
            why=f"In {steps:,} steps the allocator of the fullest, rank {fullest.rank}, held no "
            f"more than {bytes_text(fullest.held_bytes)}; with all else on its GPU "
            f"{percent_text(fullest.share)} of the memory was in use",
            next="Try a microbatch of twice the size: it fits, and each kernel and message serves "
            "twice as many samples. Or less sharding (FSDP or ZeRO over fewer ranks), which sends "
            "less, and no recomputation, which computes less. Or devices with less memory, where "
            "they cost less for what they compute",
            command=f"rankscope what-if {window.run_id}",
            confidence=(0.6, "advice: memory is measured, what the run would gain is not"),
            disproof="What is still to come needs the rest: validation, longer sequences, a larger "
            "batch later",
            levels=(Level(_HELD, "all of a GPU", fullest.limit_bytes),),
            evidence=(
                Evidence(f"Rank {fullest.rank}: {used} of {limit}", window.link(fullest.rank)),
            ),
        )
    ]


def _fullest(window: Window) -> _Use | None:
    """Return the rank that uses most of its GPU; None where that of one is not known."""
    table = window.facts.memory
    held = dict(zip(table.row_of, table.largest((_HELD, _PEAK)), strict=True))
    uses = []
    for rank in window.ranks:
        most, last = held.get(rank, 0.0), table.newest_step(rank, _HELD)
        if last <= window.policy.unused_memory_steps or not most > 0:
            return None
        room = device_room(window, rank, most)
        if room is None or not room.limit_bytes > 0:
            return None
        uses.append(_Use(rank, most, room.limit_bytes - room.left_bytes, room.limit_bytes))
    return max(uses, key=lambda use: (round(use.share, 3), use.held_bytes), default=None)


def _num_steps(window: Window) -> int:
    table = window.facts.memory
    return min(table.newest_step(rank, _HELD) for rank in window.ranks)
