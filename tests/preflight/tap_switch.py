"""A switch in user space for a laboratory's hosts: delay, jitter, loss, rate and MTU per pair.

It stands in for `tc netem`, which many kernels lack. Port i has the MAC address
02:00:00:00:00:(i+1).
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.capabilities import TUN

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_TUN_DEVICE = os.makedev(10, 200)
_ETHERNET_HEADER_BYTES = 14
_QUEUE_S = 0.4  # of a link with a rate: longer waits are dropped, as a router's buffer would
_BURST = 64  # frames of one port before the others have their turn
_numbers = itertools.count()  # taps of one process have distinct names until they are moved


def open_tun() -> int:
    """Open the device of taps; root makes one of its own where the system shows none."""
    flags = os.O_RDWR | os.O_NONBLOCK
    path = os.environ.get(TUN, "/dev/net/tun")
    if os.path.exists(path) or os.geteuid():
        return os.open(path, flags)
    with tempfile.TemporaryDirectory(prefix="tun.") as folder:
        return os.open(make_tun(Path(folder) / "tun"), flags)


def make_tun(path: Path) -> Path:
    """Make the device of taps at `path`, open to everybody. Needs root and leave to make it."""
    os.mknod(path, stat.S_IFCHR | 0o666, _TUN_DEVICE)
    path.chmod(0o666)  # whatever the umask
    return path


@dataclass(slots=True)
class Link:
    """What happens to the frames from one port to another."""

    delay: float = 0.0  # seconds, one way
    jitter: float = (
        0.0  # seconds more for two frames of three, as on two routes of which one is bad
    )
    loss: float = 0.0  # 0-1
    rate: float = 0.0  # bits per second; 0: as fast as it goes
    mtu: int = 0  # bytes of an IP packet; larger ones vanish; 0: any
    drop: Callable[[bytes], bool] | None = None
    num_frames: int = 0
    num_dropped: int = 0
    free_at: float = 0.0


class TapSwitch(threading.Thread):
    """Passes every frame between the hosts' taps."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="tap-switch")
        self._ports: dict[int, int] = {}
        self._links: dict[tuple[int, int], Link] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []  # (due, order, port, frame)
        self._order = itertools.count()
        self._halt = threading.Event()

    def link(self, start: int, end: int) -> Link:
        """Return the faults of one direction, to be set."""
        return self._links.setdefault((start, end), Link())

    def add_port(self, number: int) -> str:
        """Make a tap in the caller's namespace and return its name, for it to be moved."""
        descriptor = open_tun()
        name = f"t{os.getpid() % 100_000}x{next(_numbers) % 10_000}"
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        self._ports[number] = descriptor
        return name

    def run(self) -> None:
        """Pass frames until `stop`."""
        port_of = {descriptor: number for number, descriptor in self._ports.items()}
        with select.epoll() as poll:
            for descriptor in port_of:
                poll.register(descriptor, select.EPOLLIN)
            while not self._halt.is_set():
                for descriptor, _ in poll.poll(self._patience()):
                    self._take(port_of[descriptor], descriptor)
                self._deliver_due()

    def stop(self) -> None:
        """End the thread and close the taps."""
        self._halt.set()
        if self.is_alive():
            self.join(2)
        for descriptor in self._ports.values():
            os.close(descriptor)
        self._ports.clear()

    def _patience(self) -> float:
        if not self._waiting:
            return 0.2
        return max(0.0, min(0.2, self._waiting[0][0] - time.monotonic()))

    def _take(self, port: int, descriptor: int) -> None:
        for _ in range(_BURST):
            try:
                frame = os.read(descriptor, 70_000)
            except BlockingIOError:
                return
            except OSError:  # the namespace went away
                self._halt.set()
                return
            for end in self._ends(port, frame):
                self._send(port, end, frame)

    def _ends(self, port: int, frame: bytes) -> list[int]:
        if frame[0] & 1:  # broadcast and multicast
            return [end for end in self._ports if end != port]
        end = frame[5] - 1
        return [end] if end in self._ports and end != port else []

    def _send(self, start: int, end: int, frame: bytes) -> None:
        link = self._links.get((start, end))
        if link is None:
            self._deliver(end, frame)
            return
        link.num_frames += 1
        now = time.monotonic()
        if self._is_lost(link, frame) or (link.rate and link.free_at - now > _QUEUE_S):
            link.num_dropped += 1
            return
        due = now
        if link.rate:
            link.free_at = due = max(now, link.free_at) + len(frame) * 8 / link.rate
        due += link.delay + (link.jitter if link.num_frames % 3 else 0.0)
        if due <= now:
            self._deliver(end, frame)
        else:
            heapq.heappush(self._waiting, (due, next(self._order), end, frame))

    @staticmethod
    def _is_lost(link: Link, frame: bytes) -> bool:
        if link.loss and random.random() < link.loss:
            return True
        if link.mtu and len(frame) - _ETHERNET_HEADER_BYTES > link.mtu:
            return True
        return link.drop is not None and link.drop(frame)

    def _deliver_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._waiting)
            self._deliver(end, frame)

    def _deliver(self, end: int, frame: bytes) -> None:
        try:
            os.write(self._ports[end], frame)
        except (OSError, KeyError):  # the receiver is down or full: a wire says nothing either
            pass
