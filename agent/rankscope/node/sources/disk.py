"""Bytes, operations and busy time of each disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Lane, Row, Skipped, Source
from rankscope.node.sources.files import need, read_whole
from rankscope.node.sources.machine import Machine
from rankscope.wire.schema import ChunkKind

_SECTOR_BYTES = 512  # the unit of /proc/diskstats, whatever the disk's own is
_MAX_DISKS = 32
_IN_MEMORY = ("loop", "ram", "zram", "fd", "sr")


class DiskSource(Source):
    """Bytes, operations and busy time of each whole disk; partitions are part of theirs."""

    name: ClassVar[str] = "disk"
    kind: ClassVar[ChunkKind | None] = "disk"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._block = machine.sys / "block"
        self._file = machine.proc / "diskstats"
        self._disks: frozenset[str] = frozenset()

    def open(self) -> None:
        """Find the disks that are devices. Raises Skipped where none is to be seen."""
        need(self._file, "no block devices in this kernel, or /proc is cut down")
        try:
            names = sorted(os.listdir(self._block))
        except OSError as error:
            raise Skipped(f"{self._block}: {error.strerror}") from error
        names = [name for name in names if not name.startswith(_IN_MEMORY)]
        # device mapper and RAID stand on devices: counting both would count twice
        devices = [name for name in names if (self._block / name / "device").exists()]
        self._disks = frozenset((devices or names)[:_MAX_DISKS])
        if not self._disks:
            raise Skipped(f"no disk in {self._block}")

    def sample(self) -> Iterable[Row]:
        """Return one row for each disk."""
        rows: list[Row] = []
        for line in read_whole(self._file).splitlines():
            words = line.split()
            if len(words) < 14 or words[2] not in self._disks:
                continue
            values = [int(word) for word in words[3:14]]
            rows.append({
                "device": words[2],
                "reads_total": values[0],
                "read_bytes_total": values[2] * _SECTOR_BYTES,
                "read_us_total": values[3] * 1000,
                "writes_total": values[4],
                "written_bytes_total": values[6] * _SECTOR_BYTES,
                "write_us_total": values[7] * 1000,
                "in_flight": values[8],
                "busy_us_total": values[9] * 1000,
            })  # fmt: skip
        return rows
