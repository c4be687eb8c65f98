"""Answers about what a run cost."""

from __future__ import annotations

from rankscope_server.answers import Schema


class CostPart(Schema, frozen=True):
    """One part of the ranks' time; the shares of all parts add up to 1."""

    name: str
    what: str  # a sentence
    rank_hours: float
    share: float


class CostChange(Schema, frozen=True):
    """Something that could be otherwise, and what is assumed when it is."""

    key: str
    label: str
    assumption: str


class CostOutcome(Schema, frozen=True):
    """The mean step with these changes together."""

    keys: list[str]
    step_ms: float


class CostWhatIf(Schema, frozen=True):
    """Steps that ran, run again with changes; `outcomes` has each set of them, the empty one first.

    `step_ms` is the mean of the recorded steps, `replayed_ms` what their replay gives back.
    """

    step_lo: int
    step_hi: int
    num_steps: int
    step_ms: float
    replayed_ms: float
    changes: list[CostChange]
    outcomes: list[CostOutcome]


class RunCost(Schema, frozen=True):
    """Where the time of all ranks of a run went; without parts it is not known: `text` says why."""

    text: str
    rank_hours: float | None
    num_ranks: int
    num_attempts: int
    lost_steps: int  # that a later attempt did again
    ettr: float | None  # share of the time in steps that are kept
    parts: list[CostPart]  # the largest first, productive before all
    slow_ranks: list[int]  # that straggling is about
    num_divided: int  # steps by which waits were divided; 0: they were not
    what_if: CostWhatIf | None
    no_what_if: str  # why there is none
    notes: list[str]
    price_per_rank_hour: float | None = None  # None: no price of its hosts is set
    currency: str = ""
    spot_per_rank_hour: float | None = None  # None: the price list has none for each host
    interruptions_per_hour: float | None = None  # of all its hosts as spot; None: not in the list
    restart_seconds: float | None = None  # of an interruption, the mean; None: none
