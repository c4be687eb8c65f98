"""Answers of advice."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Schema

AdvisedAction: TypeAlias = Literal[
    "exclude_host", "restart_from_checkpoint", "stop", "wait", "nothing", "unknown"
]
ReportedOutcome: TypeAlias = Literal["done", "refused", "failed", "ignored"]


class AdviceEvidence(Schema, frozen=True):
    """One fact behind advice; `link` is relative to the dashboard's root."""

    finding_id: int
    text: str
    link: str


class AdviceCost(Schema, frozen=True):
    """What something costs; null is not known."""

    text: str
    throughput_ratio: float | None = None
    rank_hours_per_day: float | None = None
    lost_steps: int | None = None
    lost_seconds: float | None = None  # of the whole job


class AdviceReport(Schema, frozen=True):
    """What a controller reported that it did."""

    epoch: int
    time_ms: float
    controller: str
    outcome: ReportedOutcome
    text: str


class Advice(Schema, frozen=True):
    """What to do next with a run. `epoch` changes only when the advice does.

    Of a run that is over nothing is to be reported any more.
    """

    run_id: str
    epoch: int
    action: AdvisedAction
    then: Literal["restart_from_checkpoint", ""]
    hosts: list[str]
    ranks: list[int]
    from_step: int | None
    what: str
    why: str
    findings: list[int]
    evidence: list[AdviceEvidence]
    confidence: float | None
    least_confidence: float
    cost_of_doing: AdviceCost
    cost_of_not_doing: AdviceCost
    given_ms: float
    valid_until_ms: float
    is_over: bool
    reports: list[AdviceReport]


class GivenAdvice(Schema, frozen=True):
    """Advice that was given."""

    epoch: int
    given_ms: float
    action: AdvisedAction
    then: Literal["restart_from_checkpoint", ""]
    hosts: list[str]
    ranks: list[int]
    what: str
    why: str
    findings: list[int]
    confidence: float | None


class AdviceHistory(Schema, frozen=True):
    """The audit trail: what was advised and what was done, the newest first."""

    given: list[GivenAdvice]
    reports: list[AdviceReport]
