"""Which runs a sender of batches may add to."""

from __future__ import annotations

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from rankscope_server.api.access.rules import sender
from rankscope_server.api.service import service_of
from rankscope_server.store.projects import not_ours, project_of
from rankscope_server.store.tables import run


async def check_sender(request: Request, run_id: str) -> None:
    """Refuse a batch of another project's run, before it costs anything. Raises Problem 404."""
    principal = sender(request)
    if principal.only_project is None:
        return

    def look() -> str | None:
        with service_of(request).read() as connection:
            return project_of(connection, run, run_id)

    found = await run_in_threadpool(look)
    if found is not None and not principal.sees(found):
        raise not_ours(run_id)
