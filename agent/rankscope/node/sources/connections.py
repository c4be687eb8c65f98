"""TCP connections of the ranks: what each carried, how long it took, what was lost on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from rankscope.node.sources.base import RankProcess, Row, Skipped
from rankscope.node.sources.files import need, number
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.node.sources.netlink import Address, TcpConnection, address_text, port_of
from rankscope.wire.schema import ChunkKind

MAX_CONNECTIONS = 16  # of a rank in one sample
_LOOK_AGAIN = 10  # samples after which the files of a process are listed even if none came
_MAX_FILES = 65_536
_FIRST_OWN_PORT = 1024  # below it are services such as storage over HTTPS, never ranks
# Controls that pace what they send: with them data waits at the sender on any slow way.
_PACING_CONTROLS = ("bbr",)


class ConnectionSource(SampleSource):
    """What each TCP connection of a rank carried, how long it took and what was lost."""

    name: ClassVar[str] = "connections"
    kind: ClassVar[ChunkKind | None] = "connections"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 2

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._files: dict[RankProcess, tuple[int, int, frozenset[int]]] = {}
        self._store: dict[RankProcess, int] = {}  # port
        self._before: dict[tuple[int, Address, Address], int] = {}
        self._samples = 0

    def open(self) -> None:
        """Raise Skipped where the kernel does not list its sockets."""
        need(self._machine.proc / "net/tcp", "the kernel has no network, or /proc/net is hidden")
        try:
            self._machine.connections(())
        except OSError as error:
            raise Skipped(f"sockets cannot be asked for: {error}") from error

    def sample(self) -> Iterable[Row]:
        """Return the connections of each rank that moved most, lost something or are stuck."""
        self._samples += 1
        ranks = {rank: self._sockets(rank) for rank in self._machine.ranks()}
        self._forget(ranks)
        owner = {inode: rank for rank, inodes in ranks.items() for inode in inodes}
        if not owner:
            return []
        connections = self._machine.connections(owner.keys())
        here = {(each.local, each.remote): owner[each.inode] for each in connections}
        mine: dict[RankProcess, list[TcpConnection]] = {}
        for each in connections:
            rank = owner[each.inode]
            is_to_itself = here.get((each.remote, each.local)) == rank
            if not is_to_itself and not self._is_to_service(rank, each):
                mine.setdefault(rank, []).append(each)
        return [row for rank, each in mine.items() for row in self._rows(rank, each)]

    def _rows(self, rank: RankProcess, connections: Sequence[TcpConnection]) -> list[Row]:
        """Return the rows of one rank; what did not move has none, unless it is stuck."""
        ordered = []
        for each in connections:
            key = (rank.rank, each.local, each.remote)
            values = each.counters
            total = max(values.acknowledged_bytes, 0) + max(values.received_bytes, 0)
            moved = total - self._before.get(key, 0)
            self._before[key] = total
            if moved or values.in_flight_segments > 0:
                ordered.append((values.backoff > 0, moved, each))
        ordered.sort(key=lambda one: one[:2], reverse=True)
        return [_row(rank, each) for _, _, each in ordered[:MAX_CONNECTIONS]]

    def _sockets(self, rank: RankProcess) -> frozenset[int]:
        """Return the inodes of a process's sockets; its files are read when others are open."""
        directory = self._machine.proc / str(rank.pid) / "fd"
        try:
            names = os.listdir(directory)[:_MAX_FILES]
        except OSError:
            return frozenset()  # gone, or another user's
        count, at, inodes = self._files.get(rank, (-1, 0, frozenset()))
        if count != len(names) or self._samples - at >= _LOOK_AGAIN:
            links = (_link(f"{directory}/{name}") for name in names)
            inodes = frozenset(int(link[8:-1]) for link in links if link.startswith("socket:["))
            self._files[rank] = len(names), self._samples, inodes
        return inodes

    def _is_to_service(self, rank: RankProcess, connection: TcpConnection) -> bool:
        """Return whether it leads to the store of the rendezvous, or to a well-known port."""
        if rank not in self._store:
            self._store[rank] = number(_variable(self._machine, rank.pid, "MASTER_PORT"))
        ports = port_of(connection.local), port_of(connection.remote)
        return self._store[rank] in ports or min(ports) < _FIRST_OWN_PORT

    def _forget(self, ranks: Mapping[RankProcess, object]) -> None:
        """Drop what is known of processes that are gone."""
        for known in (self._files, self._store):
            for rank in known.keys() - ranks.keys():
                del known[rank]
        alive = {rank.rank for rank in ranks}
        if len(self._before) > _MAX_FILES or any(key[0] not in alive for key in self._before):
            self._before = {key: n for key, n in self._before.items() if key[0] in alive}


def _row(rank: RankProcess, connection: TcpConnection) -> Row:
    values = connection.counters
    window = values.congestion_segments
    if values.receiver_bytes >= 0 and values.segment_bytes > 0:
        window = min(window, values.receiver_bytes // values.segment_bytes)
    if connection.control.startswith(_PACING_CONTROLS):
        window = -1
    return {
        "rank": rank.rank,
        "local": address_text(connection.local),
        "remote": address_text(connection.remote),
        "acknowledged_bytes_total": values.acknowledged_bytes,
        "busy_us_total": values.busy_us,
        "receiver_limited_us_total": values.receiver_limited_us,
        "sent_segments_total": values.sent_segments,
        "retransmitted_segments_total": values.retransmitted_segments,
        "needless_segments_total": values.needless_segments,
        "dropped_segments_total": connection.drops,
        "unsent_bytes": values.unsent_bytes,
        "in_flight_segments": values.in_flight_segments,
        "window_segments": window,
        "backoff": values.backoff,
    }


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _variable(machine: Machine, pid: int, name: str) -> str:
    """Return a variable that a process was started with, empty where it cannot be read."""
    try:
        data = (machine.proc / str(pid) / "environ").read_bytes()
    except OSError:
        return ""
    head = f"{name}=".encode()
    values = (word[len(head) :] for word in data.split(b"\0") if word.startswith(head))
    return next(values, b"").decode(errors="replace")
