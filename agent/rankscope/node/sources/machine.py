"""The machine that all sources look at: every path and every library is a parameter."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.node.sources.base import News, RankProcess
from rankscope.node.sources.files import uptime_seconds
from rankscope.node.sources.netlink import TcpConnection, established
from rankscope.node.sources.nvml import Nvml


@dataclass
class Machine:
    """The outside world of all sources. A test puts a recorded tree in the place of a path."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    cgroups: Path = Path("/sys/fs/cgroup")
    kernel_log: Path = Path("/dev/kmsg")
    run_directory: Path = Path("/tmp")
    nvml: Nvml = field(default_factory=Nvml)
    connections: Callable[[Collection[int]], Sequence[TcpConnection]] = established  # by inode
    ranks: Callable[[], Sequence[RankProcess]] = tuple
    recent: Callable[[], Sequence[RankProcess]] = tuple  # gone a moment ago: news come late
    tell: Callable[[News], None] = lambda news: None
    wall_ns: Callable[[], int] = time.time_ns
    uptime: Callable[[], float] = uptime_seconds

    def tell_of(self, name: str, fields: dict[str, str], pid: int = 0, time_ns: int = 0) -> None:
        """Tell news; of a rank, where `pid` is one."""
        known = [*self.ranks(), *self.recent()]
        owner = next((rank for rank in known if rank.pid == pid), None)
        if owner is None:
            self.tell(News(name, fields, time_ns))
        else:
            self.tell(News(name, fields, time_ns, owner.attempt, owner.rank))
