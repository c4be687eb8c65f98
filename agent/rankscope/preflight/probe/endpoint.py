"""Calls the endpoint as this node believes it, and notes whose agent answers there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from rankscope.preflight.facts.endpoint import Endpoint
from rankscope.preflight.probe.dial import Caller, knock
from rankscope.preflight.system import Resolved

ANYBODY = ""  # the handshake says who answers


async def ask(
    caller: Caller, endpoint: Endpoint, resolve: Callable[[str], Awaitable[Resolved]]
) -> Endpoint:
    """Return the endpoint with what was found: each process of the job will call it likewise.

    Rank 0 does so as well: the store that it hosts is reached by the name that it was given.
    """
    resolved = await resolve(endpoint.name)
    calls = [knock(caller, one, endpoint.port, ANYBODY) for one in resolved.addresses]
    dials = await asyncio.gather(*calls)
    good = [dial for dial in dials if dial.outcome == "ok"]
    first = next(iter([*good, *dials]), None)
    return msgspec.structs.replace(endpoint, addresses=resolved.addresses, dial=first)
