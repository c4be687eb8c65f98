"""TCP counters of this network namespace: retransmits, time-outs, drops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from rankscope.node.sources.base import Lane, Row, Source
from rankscope.node.sources.files import need, read_whole
from rankscope.node.sources.machine import Machine
from rankscope.wire.schema import ChunkKind

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


class TcpSource(Source):
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
    """Yield (protocol.name, value): a line of names stands before each line of values."""
    lines = text.splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        protocol, _, words = names.partition(":")
        if protocol in ("Tcp", "TcpExt") and values.startswith(f"{protocol}:"):
            for name, value in zip(words.split(), values.split()[1:], strict=False):
                yield f"{protocol}.{name}", int(value)
