"""Calls that may block in the kernel (a network disk, a full pipe), each with a limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], limit_s: float) -> T:
    """Run `call` in a thread of its own and return its result.

    Raises TimeoutError when it does not end; the thread is left behind, and as a daemon it holds
    no other up. `asyncio.to_thread` would be waited for at exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except Exception as caught:  # noqa: BLE001 - handed to the caller, who waits for it
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="preflight-blocking", daemon=True).start()
    return await asyncio.wait_for(done, limit_s)
