"""Network interfaces, and TCP as the kernel counts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from rankscope.node.sources.base import Row
from rankscope.node.sources.files import need, number, read_or_none, read_whole
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.schema import ChunkKind

_MAX_INTERFACES = 32
_LINK_EVERY = 10  # rows: reading the speed may wait for a lock of the network stack


class NicSource(SampleSource):
    """Bytes, packets, errors, drops, speed and state of each network interface."""

    name: ClassVar[str] = "nic"
    kind: ClassVar[ChunkKind | None] = "nic"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._net = machine.sys / "class/net"
        self._file = machine.proc / "net/dev"
        self._links: dict[str, Row] = {}
        self._seen: frozenset[str] = frozenset()
        self._rows = 0

    def open(self) -> None:
        """Raise Skipped where there is no network in this namespace."""
        need(self._file, "the kernel has no network, or /proc/net is hidden")

    def sample(self) -> Iterable[Row]:
        """Return one row for each interface; devices and the loopback first where many are."""
        counters: dict[str, list[int]] = {}
        for line in read_whole(self._file).splitlines():
            name, colon, rest = line.partition(":")
            words = rest.split()
            if colon and len(words) >= 16:
                counters[name.strip()] = [int(word) for word in words]
        if self._rows % _LINK_EVERY == 0 or counters.keys() != self._seen:
            self._seen = frozenset(counters)
            self._links = {name: _link(self._net / name) for name in self._chosen(counters)}
        self._rows += 1
        return [
            {
                "interface": name,
                "received_bytes_total": values[0],
                "received_packets_total": values[1],
                "received_errors_total": values[2],
                "received_drops_total": values[3],
                "sent_bytes_total": values[8],
                "sent_packets_total": values[9],
                "sent_errors_total": values[10],
                "sent_drops_total": values[11],
                **self._links[name],
            }
            for name, values in counters.items()
            if name in self._links
        ]

    def _chosen(self, counters: dict[str, list[int]]) -> list[str]:
        """Leave out what never carried a byte; keep devices before what containers bring."""

        def place(name: str) -> tuple[bool, int]:
            return not (name == "lo" or (self._net / name / "device").exists()), -counters[name][0]

        used = [name for name, values in counters.items() if values[0] or values[8]]
        return sorted(used, key=place)[:_MAX_INTERFACES]


def _link(directory: Path) -> Row:
    row: dict[str, float | str] = {}
    state = read_or_none(directory / "operstate")
    if state in ("up", "down", "dormant", "lowerlayerdown", "notpresent"):
        row["is_up"] = int(state == "up")
    row["link_mbps"] = number(read_or_none(directory / "speed"))
    row["link_changes_total"] = number(read_or_none(directory / "carrier_changes"))
    return row


_COLUMNS = {
    "Tcp.OutSegs": "sent_segments_total",
    "Tcp.InSegs": "received_segments_total",
    "Tcp.RetransSegs": "retransmitted_segments_total",
    "Tcp.InErrs": "received_errors_total",
    "Tcp.OutRsts": "sent_resets_total",
    "Tcp.CurrEstab": "connections",
    "TcpExt.TCPTimeouts": "timeouts_total",
    "TcpExt.TCPLostRetransmit": "lost_retransmits_total",
    "TcpExt.ListenDrops": "listen_drops_total",
    "TcpExt.TCPBacklogDrop": "backlog_drops_total",
}


class TcpSource(SampleSource):
    """TCP segments, retransmits, time-outs and drops."""

    name: ClassVar[str] = "tcp"
    kind: ClassVar[ChunkKind | None] = "tcp"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._files = (machine.proc / "net/snmp", machine.proc / "net/netstat")

    def open(self) -> None:
        """Raise Skipped where there is no network in this namespace."""
        need(self._files[0], "the kernel has no network, or /proc/net is hidden")

    def sample(self) -> Iterable[Row]:
        """Return one row."""
        row: dict[str, float | str] = {}
        for path in self._files:
            for name, value in _counters(read_whole(path)):
                if name in _COLUMNS:
                    row[_COLUMNS[name]] = value
        return [row]


def _counters(text: str) -> Iterator[tuple[str, int]]:
    """Yield (protocol.name, value): a line of names comes before each line of values."""
    lines = text.splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        protocol, _, words = names.partition(":")
        if protocol in ("Tcp", "TcpExt") and values.startswith(f"{protocol}:"):
            for name, value in zip(words.split(), values.split()[1:], strict=False):
                yield f"{protocol}.{name}", int(value)
