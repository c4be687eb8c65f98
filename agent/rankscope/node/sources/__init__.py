"""Where samples of a machine come from: one file each, and the tuple that names them in order."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from rankscope.node.sources.base import Skipped
from rankscope.node.sources.cgroup import CgroupSource
from rankscope.node.sources.connections import ConnectionSource
from rankscope.node.sources.gpu import GpuHealthSource, GpuProcessSource, GpuSource
from rankscope.node.sources.gpu_activity import GpuActivitySource
from rankscope.node.sources.host import DiskSource, HostSource, PressureSource
from rankscope.node.sources.infiniband import InfinibandSource
from rankscope.node.sources.kernel_log import KernelLogSource
from rankscope.node.sources.machine import Machine, SampleSource
from rankscope.node.sources.network import NicSource, TcpSource
from rankscope.node.sources.nvlink import NvlinkSource
from rankscope.node.sources.process import ProcessSource
from rankscope.node.sources.xid import XidSource

SOURCES: tuple[type[SampleSource], ...] = (
    HostSource, PressureSource, DiskSource, NicSource, TcpSource, CgroupSource, ProcessSource,
    ConnectionSource, InfinibandSource, KernelLogSource, GpuSource, GpuActivitySource,
    GpuHealthSource, NvlinkSource, GpuProcessSource, XidSource,
)  # fmt: skip


@dataclass(frozen=True)
class Description:
    """One source on this machine: whether it works here, and why not or at what cost."""

    name: str
    state: Literal["works", "skipped", "fails"]
    reason: str


def describe(machine: Machine | None = None) -> list[Description]:
    """Open each source, take one sample and return how it went. For `rankscope doctor`."""
    machine = machine or Machine()
    return [_describe(make(machine)) for make in SOURCES]


def _describe(source: SampleSource) -> Description:
    try:
        source.open()
        began = time.thread_time_ns()
        rows = len(list(source.sample()))
        cost_ms = (time.thread_time_ns() - began) / 1e6
    except Skipped as error:
        return Description(source.name, "skipped", str(error))
    except (OSError, ValueError, LookupError) as error:
        return Description(source.name, "fails", f"{type(error).__name__}: {error}")
    finally:
        source.close()
    what = f"{rows} row{'s' * (rows != 1)}, " if source.kind else ""
    return Description(source.name, "works", f"{what}{cost_ms:.2f} ms of CPU a sample")
