"""A TCP tunnel with a delay and a bandwidth, as people reach a cluster through ssh."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 16_384


class _Link:
    """One direction that all connections share: bytes go out one after the other, then travel."""

    def __init__(self, delay_seconds: float, bytes_per_second: float) -> None:
        self._delay, self._rate = delay_seconds, bytes_per_second
        self._free_at = 0.0

    def arrives_at(self, num_bytes: int) -> float:
        """Return when so many bytes that are sent now arrive."""
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._rate
        return self._free_at + self._delay


async def _deliver(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    while True:
        at, part = await queue.get()
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        if not part:
            writer.close()
            return
        writer.write(part)
        with suppress(OSError):
            await writer.drain()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
    """Carry one direction of a connection until its end."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    delivering = asyncio.create_task(_deliver(queue, writer))
    part = b"-"
    while part:
        try:
            part = await reader.read(CHUNK_BYTES)
        except OSError:
            part = b""
        queue.put_nowait((link.arrives_at(len(part)), part))
    await delivering


async def _end() -> None:
    """End what still carries."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def tunnel(host: str, port: int, round_trip_ms: float, mbit: float) -> Iterator[str]:
    """Forward to a server; yield the address. A connection takes one more round trip to open."""
    half = round_trip_ms / 2000
    links = [_Link(half, mbit * 125_000) for _ in range(2)]

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * half)
        there_reader, there_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            _carry(reader, there_writer, links[0]), _carry(there_reader, writer, links[1])
        )

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = asyncio.start_server(connected, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
