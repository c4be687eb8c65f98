"""Answers about Rankscope itself."""

from __future__ import annotations

from rankscope_server.answers import Capped, Schema
from rankscope_server.api.operations.schema import ReadyPart
from rankscope_server.api.runs.schema import RunStatus


class SeenRun(Schema, frozen=True):
    """How much of a live run is seen, and what recording it costs."""

    run_id: str
    name: str
    status: RunStatus
    received_ms: float | None  # the server's clock
    expected: int  # ranks
    reporting: int
    silent: int
    lost: int  # records that its agents lost
    refused: int  # records that the server refused
    missing_batches: int
    thinning: str  # what is left out of recording; empty: nothing
    overhead_ratio: float | None  # worst rank that thinned; None: all within their budget
    budget_ratio: float | None


class OwnFigure(Schema, frozen=True):
    """One number of `GET /metrics`, with its sentence; null where it is not known."""

    name: str
    kind: str
    text: str
    value: float | None


class ServerAnswer(Schema, frozen=True):
    """How Rankscope itself is."""

    text: str
    version: str
    is_well: bool
    parts: list[ReadyPart]
    runs: list[SeenRun]
    runs_capped: Capped | None
    figures: list[OwnFigure]
