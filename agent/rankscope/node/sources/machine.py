"""What a source of samples is, and the machine that all of them look at."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias

from rankscope.node.sources.base import News, RankProcess, Row
from rankscope.node.sources.files import uptime_seconds
from rankscope.node.sources.netlink import TcpConnection, established
from rankscope.node.sources.nvml import Nvml
from rankscope.wire.schema import ChunkKind

# one thread each: a driver that hangs stops only its own lane
Lane: TypeAlias = Literal["kernel", "driver"]


@dataclass
class Machine:
    """The outside world of all sources: a test replaces any path or library."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    cgroups: Path = Path("/sys/fs/cgroup")
    kernel_log: Path = Path("/dev/kmsg")
    run_directory: Path = Path("/tmp")
    nvml: Nvml = field(default_factory=Nvml)
    connections: Callable[[Collection[int]], Sequence[TcpConnection]] = established  # by inode
    ranks: Callable[[], Sequence[RankProcess]] = tuple
    recent: Callable[[], Sequence[RankProcess]] = tuple  # gone a moment ago: news come late
    report: Callable[[News], None] = lambda news: None
    wall_ns: Callable[[], int] = time.time_ns
    uptime: Callable[[], float] = uptime_seconds

    def report_of(self, name: str, fields: dict[str, str], pid: int = 0, time_ns: int = 0) -> None:
        """Report news; of a rank, where `pid` is one."""
        known = [*self.ranks(), *self.recent()]
        owner = next((rank for rank in known if rank.pid == pid), None)
        if owner is None:
            self.report(News(name, fields, time_ns))
        else:
            self.report(News(name, fields, time_ns, owner.attempt, owner.rank))


class SampleSource(Protocol):
    """One thing to sample; the class docstring is its help text. The constructor does nothing."""

    name: ClassVar[str]  # kebab-case: the id in `describe`, in events and on the page
    kind: ClassVar[ChunkKind | None]  # of its rows; None: it only reports news
    lane: ClassVar[Lane]
    every: ClassVar[int]  # sampled each so many intervals of the settings

    def __init__(self, machine: Machine) -> None: ...

    def open(self) -> None:
        """Find what is to be sampled. Raises Skipped where this machine has none."""

    def sample(self) -> Iterable[Row]:
        """Return rows without time_ns and interval_ns. Raises OSError, ValueError, Skipped."""

    def close(self) -> None:
        """Let go of what `open` took, if anything."""

    def overslept(self, seconds: float) -> None:
        """Learn that the sleep before the next sample lasted so much longer than it was meant to.

        Time without a free processor is not counted: the collector, and perhaps all of its machine,
        was paused.
        """
