"""What a server does for a preflight: judges a large one, and keeps the result for the run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.exchange.base import CarrierError
from rankscope.preflight.exchange.http import RUNS, HttpBoard, upload
from rankscope.preflight.model import Verdict
from rankscope.preflight.plan import Plan

if TYPE_CHECKING:
    from rankscope.preflight.runner import Outcome

JUDGE_LIMIT_S = 20.0  # for 1,000 nodes; the hub's own part of that is some 5 s
_NO_ID = re.compile(r"[^A-Za-z0-9._-]+")  # what the server's ids do not allow
_MOST_NAME = 40


class JudgingBoard(HttpBoard):
    """Asks for the server's verdict before it closes, where only the server has all facts."""

    judged: Verdict | None = None

    async def close(self) -> None:
        """Wait until the server has judged, if it is its turn; then close the connection."""
        if self.is_judge:
            with contextlib.suppress(CarrierError):  # then our own verdict stands
                self.judged = await self.verdict(JUDGE_LIMIT_S)
        await super().close()


def judged(plan: Plan, outcome: Outcome) -> Outcome:
    """Return `outcome` with the verdict of the server, if one has judged in place of the nodes."""
    for carrier in plan.carriers:
        if isinstance(carrier, JudgingBoard) and carrier.judged is not None:
            ours = outcome.verdict
            verdict = msgspec.structs.replace(
                carrier.judged, elapsed_ms=ours.elapsed_ms, coverage=ours.coverage
            )
            return replace(outcome, verdict=verdict)
    return outcome


@dataclass(frozen=True)
class Kept:
    """Where the result is, or why it is not there."""

    url: str = ""
    error: str = ""


def keep(plan: Plan, outcome: Outcome, environ: Mapping[str, str], server: str = "") -> Kept:
    """Return where the result is kept; one node uploads what no server has coordinated.

    Without `server` it is RANKSCOPE_SERVER; with neither, nothing is sent.
    """
    for carrier in plan.carriers:
        if isinstance(carrier, HttpBoard) and carrier.id:
            return Kept(url=f"{carrier.server}{RUNS}/{carrier.id}/verdict")
    server = server or environ.get("RANKSCOPE_SERVER", "")
    if not server or plan.who.node_rank > 0:
        return Kept()
    run = outcome.run
    begun = min((report.started_unix_s for report in run.present), default=0.0)
    id = f"{_NO_ID.sub('-', run.run_id)[:_MOST_NAME]}-{int(begun):x}"
    training_run = environ.get("RANKSCOPE_RUN_ID", "")
    token = environ.get("RANKSCOPE_TOKEN", "")
    try:
        place = upload(server, id, outcome.verdict, run.present, training_run, token, environ)
    except CarrierError as error:
        return Kept(error=f"the result was not kept on the server: {error}")
    return Kept(url=place)
