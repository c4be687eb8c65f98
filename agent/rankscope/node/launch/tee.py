"""Passes the output of a command on, byte for byte, and shows it to the indexer afterwards.

Where ours is a terminal the command gets one too, so that colours and progress bars stay. Where
stdout and stderr go to the same place they share one channel: the order of their bytes stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankscope.node.launch.status import StatusLine
from rankscope.output.lines import LineIndexer, Stream

STDOUT, STDERR = 1, 2
_CHUNK_BYTES = 1 << 16
_TICK_SECONDS = 0.25
AFTER_EXIT_SECONDS = 2.0  # for output of processes that outlive the command


@dataclass
class _Channel:
    stream: Stream
    sink: int  # our own descriptor
    source: int  # where we read what the command writes
    child: int  # what the command gets
    is_terminal: bool


class Tee:
    """Channels for stdout and stderr of one command. `make_indexer` is called for each channel.

    `failed` gets what an indexer raised: its channel is passed on without one from then on.
    `stdout` is our descriptor that gets the command's stdout. `status` is a line below the output,
    where all of it is sent to one terminal.
    """

    def __init__(
        self,
        make_indexer: Callable[[Stream], LineIndexer],
        failed: Callable[[Stream, Exception], None],
        stdout: int = STDOUT,
    ) -> None:
        self._make_indexer = make_indexer
        self._failed = failed
        self._threads: list[threading.Thread] = []
        self._exited_at: float | None = None
        self.status: StatusLine | None = None
        self._channels = [_open("stdout", stdout)]
        if _same_place(stdout, STDERR):
            self._channels.append(self._channels[0])
        else:
            self._channels.append(_open("stderr", STDERR))
        if len(self._distinct()) == 1 and self._channels[0].is_terminal:
            self.status = StatusLine(stdout, write_all)

    @property
    def child_stdout(self) -> int:
        """The descriptor that the command gets as its stdout."""
        return self._channels[0].child

    @property
    def child_stderr(self) -> int:
        """The descriptor that the command gets as its stderr."""
        return self._channels[1].child

    def start(self) -> None:
        """Begin to pass on; to be called when the command has its descriptors."""
        for channel in self._distinct():
            os.close(channel.child)
            thread = threading.Thread(
                target=self._pass_on, args=(channel,), name=f"rankscope-{channel.stream}"
            )
            thread.start()
            self._threads.append(thread)

    def close_unused(self) -> None:
        """Close everything when no command was started."""
        for channel in self._distinct():
            os.close(channel.child)
            os.close(channel.source)

    def finish(self) -> None:
        """The command has ended: pass on what is still there."""
        self._exited_at = time.monotonic()
        for thread in self._threads:
            thread.join()

    def resize(self) -> None:
        """Give the command's terminal the size of ours."""
        for channel in self._distinct():
            if channel.is_terminal:
                with contextlib.suppress(OSError):
                    _copy_size(channel.sink, channel.source)

    def _distinct(self) -> list[_Channel]:
        first, second = self._channels
        return [first] if first is second else [first, second]

    def _pass_on(self, channel: _Channel) -> None:
        indexing = _Indexing(channel.stream, self._make_indexer, self._failed)
        poll = select.poll()
        poll.register(channel.source, select.POLLIN)
        try:
            while True:
                ready = poll.poll(_TICK_SECONDS * 1000)
                if ready:
                    data = _read(channel.source)
                    if not data or not self._write(channel, data):
                        return
                    indexing.run(LineIndexer.feed, data)
                elif self._is_over():
                    return
                indexing.run(LineIndexer.tick)
        finally:
            os.close(channel.source)  # from now on a writer gets SIGPIPE, as it would without us
            indexing.run(LineIndexer.close)

    def _write(self, channel: _Channel, data: bytes) -> bool:
        if self.status is not None:
            return self.status.pass_on(data)
        return write_all(channel.sink, data)

    def _is_over(self) -> bool:
        ended = self._exited_at
        return ended is not None and time.monotonic() - ended > AFTER_EXIT_SECONDS


class _Indexing:
    """The indexer of one channel, until it fails: a bug of ours may cost lines, never the run."""

    def __init__(
        self,
        stream: Stream,
        make_indexer: Callable[[Stream], LineIndexer],
        failed: Callable[[Stream, Exception], None],
    ) -> None:
        self._stream, self._failed = stream, failed
        self._indexer: LineIndexer | None = make_indexer(stream)

    def run(self, part: Callable[..., None], *arguments: bytes) -> None:
        """Let the indexer do a part of its work, if it has not failed."""
        if self._indexer is None:
            return
        try:
            part(self._indexer, *arguments)
        except Exception as error:  # noqa: BLE001 - guard of this thread: the command needs it
            self._indexer = None
            self._failed(self._stream, error)


def _open(stream: Stream, sink: int) -> _Channel:
    if not os.isatty(sink):
        source, child = os.pipe()
        return _Channel(stream, sink, source, child, is_terminal=False)
    source, child = os.openpty()
    attributes = termios.tcgetattr(child)
    attributes[1] &= ~termios.OPOST  # our own terminal does that: bytes unchanged
    termios.tcsetattr(child, termios.TCSANOW, attributes)
    _copy_size(sink, source)
    return _Channel(stream, sink, source, child, is_terminal=True)


def _same_place(first: int, second: int) -> bool:
    try:
        one, other = os.fstat(first), os.fstat(second)
    except OSError:  # one of them is closed
        return False
    return (one.st_dev, one.st_ino, one.st_rdev) == (other.st_dev, other.st_ino, other.st_rdev)


def _copy_size(terminal: int, other: int) -> None:
    size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
    fcntl.ioctl(other, termios.TIOCSWINSZ, size)


def _read(source: int) -> bytes:
    try:
        return os.read(source, _CHUNK_BYTES)
    except OSError:  # a pseudo terminal whose last writer has gone
        return b""


def write_all(sink: int, data: bytes) -> bool:
    """Write all of it, however long that takes. Returns whether there was a reader."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(sink, view) :]
        except BlockingIOError:
            select.select([], [sink], [])
        except OSError:  # the reader is gone
            return False
    return True
