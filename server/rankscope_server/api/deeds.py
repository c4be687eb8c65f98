"""What a request did, for the audit log: written once it succeeded, before its answer is sent."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

from fastapi import Request

from rankscope_server.access import audit
from rankscope_server.access.audit import Deed
from rankscope_server.api.service import Service, service_of
from rankscope_server.store.unit import Unit

log = logging.getLogger(__name__)
_DEED = "rankscope.deed"


def begin(request: Request, deed: Deed) -> None:
    """Have a deed written if the request succeeds."""
    request.scope[_DEED] = deed


def add(request: Request, target: str = "", detail: str = "", project: str = "") -> None:
    """Say more of what the request does, where it is written at all."""
    deed: Deed | None = request.scope.get(_DEED)
    if deed is not None:
        request.scope[_DEED] = dataclasses.replace(
            deed, target=target or deed.target, detail=detail or deed.detail,
            project=project or deed.project,
        )  # fmt: skip


async def write_of(request: Request) -> None:
    """Write what the request did."""
    deed: Deed | None = request.scope.pop(_DEED, None)
    if deed is not None:
        await write(service_of(request), [deed])


async def write(service: Service, found: Sequence[Deed]) -> None:
    """Write deeds; one that the store does not take is in the server's own log at least.

    A full disk must not keep a person from deleting runs.
    """

    def work(unit: Unit) -> None:
        for deed in found:
            audit.record(unit.connection, deed, unit.now_ns)

    if not found:
        return
    try:
        await asyncio.wrap_future(service.writer.submit(work))
    except Exception as error:  # noqa: BLE001 - what was done was done
        for deed in found:
            log.error("not in the audit log (%s): %r", error, deed)
