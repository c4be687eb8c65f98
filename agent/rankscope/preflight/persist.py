"""Stores the result of a preflight on a server, for the run that follows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.http import RUNS, ServerCarrier, upload
from rankscope.preflight.plan import Plan

if TYPE_CHECKING:
    from rankscope.preflight.runner import Outcome

_NO_ID = re.compile(r"[^A-Za-z0-9._-]+")  # what the server's ids do not allow
_MOST_NAME = 40


@dataclass(frozen=True)
class Stored:
    """Where the result is, or why it is not there."""

    url: str = ""
    error: str = ""


def persist(plan: Plan, outcome: Outcome, environ: Mapping[str, str], server: str = "") -> Stored:
    """Return where the result is stored; one node uploads what no server has coordinated.

    Without `server` it is RANKSCOPE_SERVER; with neither, nothing is sent.
    """
    for carrier in plan.carriers:
        if isinstance(carrier, ServerCarrier) and carrier.id:
            return Stored(url=f"{carrier.server}{RUNS}/{carrier.id}/verdict")
    server = server or environ.get("RANKSCOPE_SERVER", "")
    if not server or plan.who.node_rank > 0:
        return Stored()
    run = outcome.run
    begun = min((report.started_unix_s for report in run.present), default=0.0)
    id = f"{_NO_ID.sub('-', run.run_id)[:_MOST_NAME]}-{int(begun):x}"
    training_run = environ.get("RANKSCOPE_RUN_ID", "")
    token = environ.get("RANKSCOPE_TOKEN", "")
    try:
        url = upload(server, id, outcome.verdict, run.present, training_run, token, environ)
    except CarrierError as error:
        return Stored(error=f"the result was not kept on the server: {error}")
    return Stored(url=url)
