"""What a reader who went away asked for is not begun; what stays is answered."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio.to_thread
import pytest
from starlette.types import Message, Receive, Scope, Send

from rankscope_server.api.gone_away import NUM_THREADS, GoneAway, bound_threads

PATIENCE_SECONDS = 30.0


class Reader:
    """One request: it is answered, or its connection is closed."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.answered: list[Message] = []

    async def receive(self) -> Message:
        return await self.messages.get()

    async def send(self, message: Message) -> None:
        self.answered.append(message)

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


def test_only_what_has_begun_is_done_for_those_who_left() -> None:
    begun, release, full = [], threading.Event(), threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if len(begun) == NUM_THREADS:
            full.set()
        assert release.wait(PATIENCE_SECONDS)

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        await anyio.to_thread.run_sync(work, scope["number"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def main() -> list[Reader]:
        bound_threads()
        readers = [Reader() for _ in range(4 * NUM_THREADS)]
        asked = [
            asyncio.ensure_future(GoneAway(app)(scope(number), one.receive, one.send))
            for number, one in enumerate(readers)
        ]
        assert await asyncio.to_thread(full.wait, PATIENCE_SECONDS)
        for reader in readers[NUM_THREADS + 1 :]:  # one that waits stays
            reader.leave()
        await asyncio.wait_for(asyncio.gather(*asked[NUM_THREADS + 1 :]), PATIENCE_SECONDS)
        release.set()
        await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_SECONDS)
        return readers

    readers = asyncio.run(main())
    assert sorted(begun) == list(range(NUM_THREADS + 1))
    assert [bool(reader.answered) for reader in readers] == [
        number <= NUM_THREADS for number in range(len(readers))
    ]


def test_an_app_that_reads_on_is_cancelled_with_the_connection() -> None:
    heard: list[str] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.append((await receive())["type"])
        try:
            await receive()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def main() -> None:
        reader = Reader()
        asked = asyncio.ensure_future(GoneAway(app)(scope(0), reader.receive, reader.send))
        while not heard:
            await asyncio.sleep(0)
        reader.leave()
        await asyncio.wait_for(asked, PATIENCE_SECONDS)

    asyncio.run(main())
    assert heard == ["http.request", "cancelled"]


def test_what_an_app_raises_comes_out_as_it_is() -> None:
    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise KeyError("of the app")

    reader = Reader()
    with pytest.raises(KeyError, match="of the app"):
        asyncio.run(GoneAway(app)(scope(0), reader.receive, reader.send))


def scope(number: int) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": "/", "number": number}
