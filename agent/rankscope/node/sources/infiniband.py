"""State and counters of InfiniBand and RoCE ports, from sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.files import number, read_or_none
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.schema import ChunkKind

_WORD_BYTES = 4  # port_*_data count words of four bytes
_COUNTERS = {
    "counters/port_xmit_data": ("sent_bytes_total", _WORD_BYTES),
    "counters/port_rcv_data": ("received_bytes_total", _WORD_BYTES),
    "counters/port_xmit_packets": ("sent_packets_total", 1),
    "counters/port_rcv_packets": ("received_packets_total", 1),
    "counters/port_xmit_wait": ("sent_wait_total", 1),
    "counters/port_xmit_discards": ("sent_discards_total", 1),
    "counters/port_rcv_errors": ("received_errors_total", 1),
    "counters/port_rcv_remote_physical_errors": ("received_remote_errors_total", 1),
    "counters/symbol_error": ("symbol_errors_total", 1),
    "counters/local_link_integrity_errors": ("integrity_errors_total", 1),
    "counters/excessive_buffer_overrun_errors": ("buffer_overruns_total", 1),
    "counters/link_error_recovery": ("link_recoveries_total", 1),
    "counters/link_downed": ("link_downs_total", 1),
    "hw_counters/out_of_sequence": ("out_of_sequence_total", 1),
    "hw_counters/packet_seq_err": ("sequence_errors_total", 1),
    "hw_counters/local_ack_timeout_err": ("ack_timeouts_total", 1),
    "hw_counters/rnr_nak_retry_err": ("rnr_retries_total", 1),
    "hw_counters/roce_adp_retrans": ("adaptive_retransmits_total", 1),
    "hw_counters/np_cnp_sent": ("cnp_sent_total", 1),
    "hw_counters/rp_cnp_handled": ("cnp_handled_total", 1),
    "hw_counters/np_ecn_marked_roce_packets": ("ecn_marked_total", 1),
}
_MAX_PORTS = 64


class InfinibandSource(SampleSource):
    """State, rate, traffic and errors of each InfiniBand or RoCE port."""

    name: ClassVar[str] = "infiniband"
    kind: ClassVar[ChunkKind | None] = "infiniband"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._devices = machine.sys / "class/infiniband"
        self._ports: list[tuple[str, Path, list[tuple[Path, str, int]]]] = []

    def open(self) -> None:
        """Find the ports and the counters that each has. Raises Skipped where there is none."""
        self._ports = []
        for device in _names(self._devices):
            for port in _names(self._devices / device / "ports"):
                directory = self._devices / device / "ports" / port
                counters = [
                    (directory / path, column, factor)
                    for path, (column, factor) in _COUNTERS.items()
                    if (directory / path).exists()
                ]
                self._ports.append((f"{device}/{port}", directory, counters))
        self._ports = self._ports[:_MAX_PORTS]
        if not self._ports:
            raise Skipped(f"no port in {self._devices}: no adapter, or its driver is not loaded")

    def sample(self) -> Iterable[Row]:
        """Return one row for each port."""
        return [_port(*port) for port in self._ports]


def _port(name: str, directory: Path, counters: list[tuple[Path, str, int]]) -> Row:
    row: dict[str, float | str] = {"port": name}
    state = read_or_none(directory / "state")  # "4: ACTIVE"
    physical = read_or_none(directory / "phys_state")  # "5: LinkUp"
    rate = read_or_none(directory / "rate")  # "400 Gb/sec (4X NDR)"
    if state:
        row["is_active"] = int(state.partition(":")[0] == "4")
    if physical:
        row["is_link_up"] = int(physical.partition(":")[0] == "5")
    if rate and rate.split()[0].replace(".", "", 1).isdecimal():
        row["rate_gbps"] = float(rate.split()[0])
    for path, column, factor in counters:
        value = number(read_or_none(path))
        if value >= 0:
            row[column] = value * factor
    return row


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
