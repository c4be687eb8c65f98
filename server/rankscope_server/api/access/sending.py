"""Which runs a sender of batches may add to: a new one becomes its project's."""

from __future__ import annotations

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from rankscope_server.api.access.rules import sender
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem, not_found
from rankscope_server.store.projects import claim_run, project_of
from rankscope_server.store.tables import run
from rankscope_server.store.unit import Unit


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
        raise _not_ours(run_id)


def claim(request: Request, unit: Unit, run_id: str) -> None:
    """Make a new run the sender's, in the transaction that stores its first batch.

    Raises Problem 404 where another project was quicker.
    """
    project = sender(request).only_project
    if project is not None and not claim_run(unit.connection, run_id, project):
        raise _not_ours(run_id)


def _not_ours(run_id: str) -> Problem:
    return not_found(
        f"no run {run_id[:128]!r} of the project of this token",
        "choose another name with RANKSCOPE_RUN_ID, or use a token of that project", "run_id",
    )  # fmt: skip
