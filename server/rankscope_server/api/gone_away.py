"""Who went away needs no answer: what a reader asked for last is not begun any more.

Someone who moves over a map asks for another piece of it with every key, and the browser drops all
but the newest question. The framework does not notice: it would work on each of them, and with as
many threads as it likes, on which those that wait for an answer have to wait, too.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# That work on answers. They share one interpreter: more would only make each other slower, and
# what has begun is done to its end.
NUM_THREADS = 8


class GoneAway:
    """ASGI middleware that drops requests whose sender has closed the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, as long as its sender is there."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        was_read, failure = False, None

        async def nothing_more() -> Message:
            nonlocal was_read
            if was_read:
                await anyio.sleep_forever()  # until the connection is closed
            was_read = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                await self._app(scope, nothing_more, send)
            except Exception as error:  # noqa: BLE001 - a task group would wrap it into a group
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


def bound_threads() -> None:
    """Let few threads work on answers; call it where the event loop runs."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
